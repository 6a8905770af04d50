"""What it costs to tell requests which tokens they attend: `python -m benchmarks.attention_looks MODEL`.

In one engine, without the service around it, the same sequences decode in blocks of steps, by turns with all of them
watched and with none. Printed are the medians of both, how often was looked, and the
host's time for looks as a share of the watched steps'.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import replace

from gpu_worker.config import WorkerConfig
from gpu_worker.engine.build import build_engine
from gpu_worker.engine.engine import Engine
from gpu_worker.records import AttentionEvent, Budget, ErrorEvent, Event, GenerationRequest, SamplingParams
from gpu_worker.state.sequence import Status
from kv_store.local import LocalStore


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a directory, as of carrel serve")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--policy", default="pqcache")
    parser.add_argument("--budget", type=float, default=0.1, help="share of the prompt")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--blocks", type=int, default=10, help="of each kind")
    parser.add_argument("--steps", type=int, default=50, help="of a block")
    parser.add_argument("--arena-gib", type=int, default=2)
    options = parser.parse_args()
    with LocalStore(options.arena_gib << 30) as store, tempfile.TemporaryDirectory() as folder:
        config = WorkerConfig(
            model=options.model,
            listen=f"unix:{folder}/unused.sock",
            store=store.target,
            device=options.device,
            max_model_len=options.context + 2 * (options.blocks + 1) * options.steps + 64,
            max_num_seqs=options.batch,
        )
        engine = build_engine(config, lambda stage, done, total: None)
        try:
            measure(engine, options)
        finally:
            engine.close()


def measure(engine: Engine, options: argparse.Namespace) -> None:
    """Decode in blocks, and print what they took."""
    num_looks = 0

    def sink(event: Event) -> None:
        nonlocal num_looks
        match event:
            case AttentionEvent():
                num_looks += 1
            case ErrorEvent(error):
                raise error

    source, budget = random.Random(0), Budget(share=options.budget)
    sampling = SamplingParams(
        max_tokens=2 * (options.blocks + 1) * options.steps, temperature=0.0, ignore_eos=True
    )
    for number in range(options.batch):
        prompt = tuple(source.randrange(engine.info.vocab_size) for _ in range(options.context))
        engine.submit(GenerationRequest(str(number), prompt, sampling, options.policy, budget), sink)
    while len(decoding := engine.scheduler.with_status(Status.DECODE)) < options.batch:
        engine.step()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    # The first two compile and warm up.
    for block in range(2 * (options.blocks + 1)):
        watched = block % 2 == 1
        for sequence in decoding:
            sequence.request = replace(sequence.request, attention=watched)
        begun = time.perf_counter()
        for _ in range(options.steps):
            engine.step()
        seconds[watched].append((time.perf_counter() - begun) / options.steps)
    num_watched = (options.blocks + 1) * options.steps
    share = engine.decode.views.spent_seconds / (sum(seconds[True]) * options.steps)
    off, on = (statistics.median(seconds[kind][1:]) for kind in (False, True))
    print(
        f"{engine.info.device}, {options.policy} at {options.budget:g}, {options.context} tokens x {options.batch}: "
        f"{1e3 * off:.3f} ms a step, {1e3 * on:.3f} ms watched ({100 * (on / off - 1):+.2f} %), "
        f"{num_looks} looks in {num_watched} watched steps take {100 * share:.2f} % of the host's time"
    )


if __name__ == "__main__":
    main()
