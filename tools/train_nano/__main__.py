"""Trains `carrel-nano` from the books to the finished model directory, in one command."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from carrel.evaluation import corpus
from carrel.evaluation.documents import Codec, TokenizedBook, tokenize_book
from carrel.evaluation.words import pools
from tools.train_nano import card, evaluate, export, producers, tokenizer
from tools.train_nano.config import Recipe
from tools.train_nano.model import Llama
from tools.train_nano.trainer import Trainer

WATCHED = ("16 mixed", "16 neighbour")
FINAL_SIZES = {1024: 200, 4096: 200, 8192: 200, 16384: 200, 32768: 100}


def main() -> None:
    """Entry point of `python -m tools.train_nano`."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_nano", description=__doc__)
    parser.add_argument(
        "--books", type=Path, required=True, help="folder with train/ and heldout/ books (*.txt.xz)"
    )
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument(
        "--work", type=Path, help="folder for token arrays and checkpoints (default: OUT.work)"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use instead of training one")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 1) - 3), help="data processes"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in the work folder"
    )
    parser.add_argument("--init", type=Path, help="model directory whose weights to start from")
    parser.add_argument("--first-phase", type=int, default=1, help="phase to start at, from 1 (with --init)")
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the recipe's steps to run (default: 1)"
    )
    parser.add_argument(
        "--lr-share", type=float, default=1.0, help="share of the recipe's learning rates (default: 1)"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny run of every part, for a CPU")
    parser.add_argument(
        "--evaluate-only", action="store_true", help="score the model in OUT and write its card"
    )
    run(parser.parse_args())


def run(args: argparse.Namespace) -> None:
    """Runs every stage; raises the stages' typed errors."""
    began = time.monotonic()
    recipe = (Recipe().smoke() if args.smoke else Recipe()).scaled(args.share, args.lr_share)
    work = args.work or args.out.with_name(args.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    if not args.evaluate_only:
        _train(args, recipe, work, device, began)
    codec = Codec(Tokenizer.from_file(str(args.out / "tokenizer.json")))
    model = export.load_model(args.out).to(device)
    sizes = {512: 2, 1024: 2} if args.smoke else FINAL_SIZES
    limit = 400_000 if args.smoke else None
    books = [tokenize_book(codec, book, limit) for book in corpus.load(args.books, "eval")]
    scores = evaluate.score(model, codec, books, pools("eval"), sizes, recipe.seed)
    (args.out / "scores.json").write_text(
        json.dumps([s.as_json() for s in scores], indent=1) + "\n", encoding="utf-8"
    )
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    (args.out / "README.md").write_text(card.render(recipe, scores, machine), encoding="utf-8")
    print(evaluate.table(scores), flush=True)
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)


def _train(args: argparse.Namespace, recipe: Recipe, work: Path, device: torch.device, began: float) -> None:
    train_paths = corpus.book_paths(args.books, "train")
    dev_paths = corpus.book_paths(args.books, "dev")
    if args.smoke:
        train_paths, dev_paths = train_paths[1:3], dev_paths[:1]
    texts = [corpus.read_book(path) for path in train_paths]
    tokenizer_file = _write_tokenizer(args, recipe, texts)
    word_pools = producers.training_pools(texts, recipe.seed)
    del texts
    folder = work / "tokens"
    producers.tokenize_books(train_paths, tokenizer_file, folder, args.workers)
    print(f"{len(train_paths)} books tokenised after {time.monotonic() - began:.0f} s", flush=True)
    codec = Codec(Tokenizer.from_file(str(tokenizer_file)))
    dev_books = [tokenize_book(codec, corpus.read_book(path), 1_000_000) for path in dev_paths]

    torch.manual_seed(recipe.seed)
    model = Llama(recipe.model) if args.init is None else export.load_model(args.init).float()
    trainer = Trainer(recipe, model, device, work)
    trainer.progress.phase = args.first_phase - 1
    if args.resume:
        trainer.resume()

    def watch(phase: int) -> None:
        export.save_model(trainer.model, args.out)
        print(_watch(args.out, codec, dev_books, recipe, phase, device), flush=True)

    with producers.Producers(recipe, folder, tokenizer_file, word_pools, args.workers) as source:
        trainer.run(source, watch)
    print(f"trained after {time.monotonic() - began:.0f} s", flush=True)


def _write_tokenizer(args: argparse.Namespace, recipe: Recipe, texts: list[corpus.Book]) -> Path:
    path = args.out / "tokenizer.json"
    if args.tokenizer is None:
        trained = tokenizer.train((book.text[:1_500_000] for book in texts), recipe.model.vocab_size)
    else:
        trained = Tokenizer.from_file(str(args.tokenizer))
    tokenizer.save(trained, args.out, recipe.model.max_position_embeddings)
    return path


def _watch(
    out: Path, codec: Codec, books: list[TokenizedBook], recipe: Recipe, phase: int, device: torch.device
) -> str:
    """Scores on the dev split, from the exported weights."""
    context = recipe.phases[phase].context
    sizes = dict.fromkeys(
        (1024, context) if context > 1024 else (context,), 2 if device.type == "cpu" else 64
    )
    model = export.load_model(out).to(device)
    scores = evaluate.score(model, codec, books, pools("dev"), sizes, recipe.seed, WATCHED)
    return evaluate.table(scores)


if __name__ == "__main__":
    main()
