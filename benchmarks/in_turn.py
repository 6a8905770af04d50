"""One batch that decodes on and on in one engine, without the service around it, in blocks of steps of several kinds by
turns: what each kind's steps take beside the others'."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.figures import Spread, write_json
from carrel.evaluation.about import describe, hash_files, model_files
from gpu_worker.config import Dtype, WorkerConfig
from gpu_worker.engine.build import build_engine
from gpu_worker.engine.engine import Engine
from gpu_worker.records import Budget, Constraint, ErrorEvent, Event, GenerationRequest, SamplingParams
from gpu_worker.state.sequence import Sequence, Status
from kv_store.local import LocalStore


@dataclass(frozen=True)
class Steps:
    """Of one kind, a mean for each block. ms: by the clock; cpu_ms: of this process's processors, which others that are
    busy do not lengthen by making it wait. ratio, cpu_ratio: to the block of the first kind in the same round."""

    ms: Spread
    cpu_ms: Spread
    ratio: Spread
    cpu_ratio: Spread


class Steppable(Protocol):
    def step(self) -> bool: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a directory or GGUF file, as of carrel serve")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--policy", default="bitkeys")
    parser.add_argument("--budget", type=float, default=0.1, help="share of the prompt")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--blocks", type=int, default=20, help="of each kind")
    parser.add_argument("--steps", type=int, default=25, help="of a block")
    parser.add_argument("--arena-gib", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")


def num_steps(options: argparse.Namespace, num_kinds: int) -> int:
    """Of all blocks; a round of one each warms up."""
    return num_kinds * (options.blocks + 1) * options.steps


@contextmanager
def engine_for(options: argparse.Namespace, num_tokens: int, dtype: Dtype = "auto") -> Iterator[Engine]:
    """An engine with room for so many tokens after each prompt."""
    with LocalStore(options.arena_gib << 30) as store, tempfile.TemporaryDirectory() as folder:
        config = WorkerConfig(
            model=options.model,
            listen=f"unix:{folder}/unused.sock",
            store=store.target,
            device=options.device,
            dtype=dtype,
            max_model_len=options.context + num_tokens + 64,
            max_num_seqs=options.batch,
        )
        engine = build_engine(config, lambda stage, done, total: None)
        try:
            yield engine
        finally:
            engine.close()


def decoding(
    engine: Engine,
    options: argparse.Namespace,
    num_tokens: int,
    sink: Callable[[Event], None] = lambda event: None,
    constraint: Constraint | None = None,
) -> list[Sequence]:
    """The batch, once all of it decodes. constraint: of the first."""

    def told(event: Event) -> None:
        match event:
            case ErrorEvent(error):
                raise error
            case _:
                sink(event)

    source, sampling = (
        random.Random(0),
        SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
    )
    for number in range(options.batch):
        prompt = tuple(source.randrange(engine.info.vocab_size) for _ in range(options.context))
        engine.submit(
            GenerationRequest(
                str(number),
                prompt,
                sampling,
                options.policy,
                Budget(share=options.budget),
                constraint=constraint if number == 0 else None,
            ),
            told,
        )
    while len(found := engine.scheduler.with_status(Status.DECODE)) < options.batch:
        engine.step()
    return sorted(found, key=lambda sequence: int(sequence.sequence_id))


def in_turn(
    engine: Steppable, kinds: Mapping[str, Callable[[], None]], num_blocks: int, num_steps: int
) -> dict[str, Steps]:
    """By kind, of so many blocks each behind one that warms up. kinds: what is done before a block of each."""
    blocks: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(num_blocks + 1):
        for kind, prepare in kinds.items():
            prepare()
            begun = time.perf_counter(), time.process_time()
            for _ in range(num_steps):
                engine.step()
            ended = time.perf_counter(), time.process_time()
            wall, cpu = (1e3 * (end - begin) / num_steps for begin, end in zip(begun, ended, strict=True))
            blocks[kind].append((wall, cpu))
    first = next(iter(blocks.values()))[1:]
    found = {}
    for kind, (_, *own) in blocks.items():
        wall, cpu = zip(*own, strict=True)
        ratios = [
            tuple(one / other for one, other in zip(*pair, strict=True))
            for pair in zip(own, first, strict=True)
        ]
        of_wall, of_cpu = zip(*ratios, strict=True)
        found[kind] = Steps(*map(Spread.of, (wall, cpu, of_wall, of_cpu)))
    return found


def show(found: Mapping[str, Steps]) -> None:
    """A line a kind, on stdout."""
    for kind, steps in found.items():
        print(
            f"{kind}: {steps.ms.median:.3f} ms a step, {steps.cpu_ms.median:.3f} of a processor; to the first "
            f"{steps.ratio.median:.4f}, of a processor {steps.cpu_ratio.median:.4f}"
        )


def write(
    module: str, options: argparse.Namespace, load: float, engine: Engine, found: dict[str, Any]
) -> None:
    """To `--json`, with what was measured on. load: the machine's before the run."""
    about = describe(engine.info.device)
    paths = {options.model: "MODEL", str(options.json): "FILE"}
    arguments = [paths.get(word, word) for word in sys.argv[1:]]
    about["command"] = shlex.join(["python", "-m", module, *arguments])
    about["model"] = Path(options.model).name
    about["model_sha256"] = hash_files(model_files(Path(options.model)))
    about["vocab_size"], about["threads"] = (
        engine.info.vocab_size,
        int(os.environ.get("OMP_NUM_THREADS", "0")),
    )
    about["load_average_before"] = round(load, 2)
    write_json(options.json, {"about": about, **found})


def as_json(steps: Mapping[str, Steps]) -> dict[str, Any]:
    return {kind: asdict(each) for kind, each in steps.items()}
