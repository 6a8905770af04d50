"""`python -m benchmarks.argmax`: how often a model chooses in bfloat16 the token that it chooses in float32.

The reference is `transformers` in float32; beside it stand `transformers` and Carrel in bfloat16, after the same texts.
Carrel's tokens come from its prefill and from decode steps, those of `transformers` from one pass over the text.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.figures import write_json
from carrel.evaluation.about import describe, hash_files, model_files
from carrel.evaluation.fidelity.passages import Passages
from carrel.evaluation.scoring import Rate, bootstrap
from carrel.evaluation.suite import Library, Suite
from carrel.process.gguf_file import read_gguf
from gpu_worker.config import WorkerConfig
from gpu_worker.engine.build import build_engine
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.steps.decode import StepResult
from gpu_worker.models.gguf_checkpoint import GGUFCheckpoint
from gpu_worker.models.loader import read_config
from gpu_worker.records import (
    Budget,
    CompleteEvent,
    ErrorEvent,
    Event,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from gpu_worker.sampling.filters import first_k
from kv_store.local import LocalStore

ARENA_BYTES = 64 << 20
# Best minus second of float32, in logits: below it two tokens are nearly tied.
NEAR_TIE = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    texts = _texts(options)
    reference, margins = _transformers(options, texts, torch.float32)
    rivals = {"transformers bfloat16": _transformers(options, texts, torch.bfloat16)[0]}
    prefilled, decoded = _carrel(options, texts)
    ends = slice(-prefilled.shape[1], None)
    last = reference[:, ends], margins[:, ends]
    rows = [
        *(_row(name, "prefill", found[:, ends], *last) for name, found in rivals.items()),
        _row("carrel bfloat16", "prefill", prefilled, *last),
        *(_row(name, "prefill, every place", found, reference, margins) for name, found in rivals.items()),
        _row("carrel bfloat16", "decode, every place", decoded, reference, margins),
    ]
    about = describe(options.device)
    about["command"] = " ".join(["python -m benchmarks.argmax", *(argv or sys.argv[1:])])
    about |= {
        "model": options.model.name,
        "model_sha256": hash_files(model_files(options.model)),
        "lengths": sorted(map(len, texts)),
        "num_forced": options.forced,
        "seed": options.seed,
    }
    write_json(options.json, {"about": about, "argmax": rows})
    for row in rows:
        print(row)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.argmax", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="GGUF file or directory")
    parser.add_argument("--text-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", default="cuda", metavar="NAME")
    parser.add_argument("--prompts", type=int, default=200, metavar="N", help="half of them short")
    parser.add_argument("--short", type=int, nargs=2, default=(16, 512), metavar=("FROM", "TO"))
    parser.add_argument("--long", type=int, nargs=2, default=(1024, 8000), metavar=("FROM", "TO"))
    parser.add_argument(
        "--forced", type=int, default=32, metavar="N", help="last tokens of a text, which Carrel decodes"
    )
    parser.add_argument(
        "--prefills", type=int, default=8, metavar="N", help="prompts of a text, each a token shorter"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    return parser


def _texts(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Runs of books of many lengths, each longer than what is forced."""
    library = Library(texts=options.text_dir)
    passages = Passages(Suite(options.model, library, options.seed).tokenizer, library.files(), options.seed)
    rng = Random(options.seed)
    lengths = [
        rng.randint(*(options.short if index % 2 else options.long)) + options.forced
        for index in range(options.prompts)
    ]
    return [passages.passage(length, index) for index, length in enumerate(lengths)]


@torch.inference_mode()
def _transformers(
    options: argparse.Namespace, texts: Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Best tokens after the last `forced` + 1 places, int64 [P, forced + 1], and how far before the second, float32."""
    loaded = load_dense(options.model, dtype).to(options.device)
    best, margin = [], []
    for text in texts:
        inputs = torch.tensor([text], device=options.device)
        logits = loaded(inputs, use_cache=False, logits_to_keep=options.forced + 1).logits[0].float()
        # In the engine's order, where of equal logits the smaller token is the first.
        token_ids = first_k(logits, 2)
        top = logits.gather(-1, token_ids)
        best.append(token_ids[:, 0].cpu())
        margin.append((top[:, 0] - top[:, 1]).cpu())
    del loaded
    gc.collect()
    if options.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return torch.stack(best), torch.stack(margin)


def load_dense(model: Path, dtype: torch.dtype) -> Any:
    """The model in `transformers`, its weights dense in `dtype`, on the CPU. What reads GGUF there may leave weights
    packed, and then computes in another type: those of a file are read by Carrel."""
    if not model.is_file():
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()
    config = AutoConfig.from_pretrained(model.parent, gguf_file=model.name)
    made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    checkpoint = GGUFCheckpoint(read_gguf(model), read_config(model))
    missing, unknown = made.load_state_dict(dict(checkpoint.tensors(checkpoint.names())), strict=False)
    made.tie_weights()
    if unknown or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"{model} has other weights than transformers asks for: {missing}, {unknown}")
    return made


def _carrel(options: argparse.Namespace, texts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Best tokens after the last places, each prefilled for itself, [P, prefills], and after the last of steps,
    [P, forced + 1], of which the first comes from the prefill of what is not forced."""
    store = LocalStore(ARENA_BYTES)
    config = WorkerConfig(
        model=str(options.model),
        listen="127.0.0.1:1",
        store=store.target,
        device=options.device,
        dtype="bfloat16",
        max_model_len=max(map(len, texts)) + 8,
        max_num_seqs=8,
        policy="full",
        prefix_cache=False,
        no_warmup=True,
    )
    engine = build_engine(config, lambda stage, done, total: None)
    try:
        driver = _Driver(engine)
        cuts = range(options.prefills - 1, -1, -1)
        whole = [[driver.submit(text[: len(text) - cut], 0) for cut in cuts] for text in texts]
        driver.run()
        heads = [driver.submit(text[: -options.forced], 0) for text in texts]
        driver.run()
        names = [driver.submit(text, len(text) - options.forced) for text in texts]
        driver.run()
        first = torch.tensor([[driver.tokens[name]] for name in heads])
        steps = [driver.steps[name] for name in names]
        later = [
            [step[len(text) - options.forced + k + 1] for k in range(options.forced)]
            for text, step in zip(texts, steps, strict=True)
        ]
        prefilled = torch.tensor([[driver.tokens[name] for name in of_text] for of_text in whole])
        return prefilled, torch.cat([first, torch.tensor(later)], dim=1)
    finally:
        engine.close()
        store.close()


class _Driver:
    """Requests of one token each. tokens: what came, by name. steps: best token by the number of tokens before it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_running = 0
        self._count = 0
        self.tokens: dict[str, int] = {}
        self.steps: dict[str, dict[int, int]] = {}
        engine.decode.watch = self._note

    def submit(self, text: tuple[int, ...], num_prefill: int) -> str:
        self._count += 1
        name = f"argmax-{self._count}"

        def take(event: Event) -> None:
            match event:
                case TokenEvent(token_id):
                    self.tokens[name] = token_id
                case CompleteEvent():
                    self._num_running -= 1
                case ErrorEvent(error):
                    raise error

        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(
            name, text, sampling, "full", Budget(share=1.0), num_prefill_tokens=num_prefill
        )
        self._num_running += 1
        self._engine.submit(request, take)
        return name

    def run(self) -> None:
        tended = time.monotonic()
        while self._num_running:
            self._engine.step()
            if time.monotonic() - tended > 1:
                self._engine.tend()
                tended = time.monotonic()

    def _note(self, result: StepResult) -> None:
        best = result.logits.argmax(-1).tolist()
        for sequence, token in zip(result.sequences, best, strict=True):
            self.steps.setdefault(sequence.sequence_id, {})[sequence.num_tokens] = cast(int, token)


def _row(who: str, how: str, found: Tensor, reference: Tensor, margins: Tensor) -> dict[str, Any]:
    """The share of equal tokens, with Wilson's interval for one token a text, else by bootstrap over texts."""
    same = found == reference
    if same.shape[1] == 1:
        rate = Rate(int(same.sum()), same.numel())
        value, (low, high) = rate.value, rate.interval
    else:
        mean = bootstrap(same.double().mean(1).tolist())
        value, low, high = mean.value, mean.low, mean.high
    apart = margins[~same]
    return {
        "who": who,
        "how": how,
        "compared": same.numel(),
        "same": value,
        "low": low,
        "high": high,
        "near_ties": float((margins < NEAR_TIE).float().mean()),
        "widest_margin_lost": float(apart.max()) if apart.numel() else 0.0,
    }


if __name__ == "__main__":
    sys.exit(main())
