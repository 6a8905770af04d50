"""What PQ's training set costs a long context: `python -m benchmarks.pq_points --text BOOK... --json FILE`.

The keys of every layer and head of a context of each book are fitted on so many points a centroid, by the store's
trainer and by the device's, each context by itself and then all together as one. Held against the exact keys are the
codebooks, and what they select for the context's last queries.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import faiss
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.commands.hitrate import MODEL
from benchmarks.commands.options import num_tokens
from benchmarks.figures import Spread, write_json
from benchmarks.hitrate.texts import Text, cut_documents, load_tokenizer, read_text
from carrel.evaluation.about import describe, hash_files, model_files
from gpu_worker.calibration import observe_layer
from gpu_worker.kernels.kmeans.lloyd import DEFAULT_ITERATIONS
from gpu_worker.models import load_model
from gpu_worker.policies.pqcache.policy import PQCache, train_pq
from kv_store.client import PQParams
from kv_store.index import ArrayKeys, FitOptions, make_index
from kv_store.topk import top_k_positions

F32: TypeAlias = npt.NDArray[np.float32]
Codebooks: TypeAlias = F32
# Of one head: its codebooks, and the seconds of a processor that fitting them took.
Trainer: TypeAlias = Callable[[F32, int], tuple[Codebooks, float]]
# Sinks are no candidates, nor is the window.
NUM_SINK, SHARE, SEED = PQCache().num_sink, 20, 1
PARAMS = PQParams(max_iterations=DEFAULT_ITERATIONS)
ALL = 0


@dataclass(frozen=True)
class Head:
    """Of one layer and KV head: candidates [n, d], and the last queries [w, H_q / H_kv, d], all of which see them."""

    keys: F32
    queries: F32


@dataclass(frozen=True)
class PointsRow:
    """Of heads of as many tokens. contexts: that were joined. points_per_centroid: 0 is all. errors: of each head, the
    squares of what codes leave of its keys, to those of the keys less their mean. recalls: of a head's queries, the
    share of the best twentieth by exact weight that is the best by codes. cpu_seconds: of fitting its codebooks,
    and of coding its keys where the device's trainer does both."""

    tokens: int
    contexts: int
    trainer: str
    points_per_centroid: int
    points: int
    errors: list[float]
    recalls: list[float]
    cpu_seconds: list[float]


def by_store(keys: F32, points_per_centroid: int) -> tuple[Codebooks, float]:
    """As the store fits them."""
    fit = make_index(PQParams(max_iterations=DEFAULT_ITERATIONS, codebooks_only=True)).fit_head
    begun = time.process_time()
    [codebooks] = fit(ArrayKeys(keys), FitOptions(DEFAULT_ITERATIONS, SEED, points_per_centroid)).arrays
    return codebooks, time.process_time() - begun


def by_device(keys: F32, points_per_centroid: int) -> tuple[Codebooks, float]:
    """As a worker with `--index-device gpu` fits them, here by the kernels' references; all keys are coded, too."""
    begun = time.process_time()
    found = train_pq(torch.from_numpy(keys)[None], PARAMS, SEED, points_per_centroid or len(keys))
    return found["codebooks"][0].numpy(), time.process_time() - begun


TRAINERS: dict[str, Trainer] = {"store": by_store, "device": by_device}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    options, load = parser().parse_args(argv), os.getloadavg()[0]
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    tokenizer = load_tokenizer(options.model)
    texts = [read_text(path, tokenizer) for path in options.text]
    contexts = read_contexts(options, texts)
    alone = [head for context in contexts for head in context]
    rows = measure(alone, 1, options.points)
    if len(contexts) > 1:
        rows += measure(
            [joined(heads) for heads in zip(*contexts, strict=True)], len(contexts), options.points
        )
    about = describe("cpu")
    paths = {str(path) for path in (options.model, *options.text, options.json)}
    words = [Path(word).name if word in paths else word for word in argv or sys.argv[1:]]
    about |= {
        "command": shlex.join(["python", "-m", "benchmarks.pq_points", *words]),
        "model": options.model.name,
        "model_sha256": hash_files(model_files(options.model)),
        "texts": [asdict(text.source) for text in texts],
        "load_average_before": round(load, 2),
    }
    write_json(options.json, {"about": about, "rows": [asdict(row) for row in rows]})
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.pq_points", description=__doc__)
    made.add_argument("--model", type=Path, default=MODEL, metavar="DIR", help="default: carrel-nano")
    made.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE", help="books")
    made.add_argument(
        "--context", type=num_tokens, default=32768, metavar="N", help="tokens of each book (32K)"
    )
    made.add_argument("--queries", type=int, default=64, metavar="N", help="last ones of a context")
    made.add_argument(
        "--points", nargs="+", type=int, default=(32, 64, 128, 256, ALL), metavar="N", help="0: all"
    )
    made.add_argument("--dtype", default="bfloat16", metavar="NAME", help="of keys and queries")
    made.add_argument("--json", type=Path, required=True, metavar="FILE")
    return made


@torch.inference_mode()
def read_contexts(options: argparse.Namespace, texts: Sequence[Text]) -> list[list[Head]]:
    """The heads of a context of each text."""
    loaded = load_model(str(options.model), device=torch.device("cpu"), dtype=getattr(torch, options.dtype))
    decoder, found = loaded.decoder, []
    for tokens in cut_documents(texts, len(texts), options.context):
        hidden, heads = decoder.embed(torch.tensor(tokens)), []
        for layer in range(decoder.config.num_layers):
            queries, keys, hidden = observe_layer(decoder, layer, hidden)
            last = queries[:, -options.queries :].float().unflatten(0, (len(keys), -1)).transpose(1, 2)
            there = keys[:, NUM_SINK : -options.queries].float()
            heads += [
                Head(own.numpy(), asked.contiguous().numpy()) for own, asked in zip(there, last, strict=True)
            ]
        found.append(heads)
        print(f"{len(found)} of {len(texts)} contexts are read", flush=True)
    return found


def joined(heads: Sequence[Head]) -> Head:
    """One context of all, before the queries of the last."""
    return Head(np.concatenate([head.keys for head in heads]), heads[-1].queries)


def measure(heads: Sequence[Head], num_contexts: int, points: Sequence[int]) -> list[PointsRow]:
    """Of heads of one length, every trainer and number of points."""
    num_keys, found = len(heads[0].keys), []
    best = [[top_twentieth(head, queries) for queries in head.queries] for head in heads]
    for name, trainer in TRAINERS.items():
        for each in points:
            of_heads = [
                measure_head(head, exactly, trainer, each) for head, exactly in zip(heads, best, strict=True)
            ]
            fitted = make_index(PARAMS).num_points(num_keys, each)
            errors, recalls, seconds = (list(of) for of in zip(*of_heads, strict=True))
            found.append(PointsRow(num_keys, num_contexts, name, each, fitted, errors, recalls, seconds))
            medians = [Spread.of(of).median for of in (errors, recalls, seconds)]
            print(f"{num_keys} keys, {name}, {fitted} points:", *(f"{of:.4f}" for of in medians), flush=True)
    return found


def measure_head(
    head: Head, exactly: Sequence[Any], trainer: Trainer, points: int
) -> tuple[float, float, float]:
    """error, recall and seconds as of `PointsRow`."""
    index, keys = make_index(PARAMS), head.keys
    codebooks, seconds = trainer(keys, points)
    codes = index.extend_head(ArrayKeys(keys), (codebooks,))
    parts = range(codes.shape[1])
    left = keys - np.concatenate([codebooks[part, codes[:, part]] for part in parts], axis=1)
    error = float(np.square(left).sum() / np.square(keys - keys.mean(axis=0)).sum())
    hits = 0
    for queries, best in zip(head.queries, exactly, strict=True):
        chosen = index.select_head(queries, [(codebooks, codes)], len(best), scale(queries))
        hits += len(np.intersect1d(chosen, best, assume_unique=True))
    return round(error, 5), round(hits / sum(map(len, exactly)), 5), round(seconds, 4)


def top_twentieth(head: Head, queries: F32) -> npt.NDArray[np.int64]:
    """The twentieth of the keys that has most weight, summed over the group's queries [G, d]."""
    scores = queries @ head.keys.T * scale(queries)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return top_k_positions(
        (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0), len(head.keys) // SHARE
    )


def scale(queries: F32) -> float:
    """Of attention."""
    return float(queries.shape[-1]) ** -0.5


if __name__ == "__main__":
    sys.exit(main())
