"""What a prompt and a decode step take of a CPU by type of number: `python -m benchmarks.dtypes MODEL`.

Each type has an engine of its own in each round, and a round before those that count. Only the time of the processor is
told: work beside it does not lengthen that.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from typing import get_args

from benchmarks.figures import Spread
from benchmarks.in_turn import add_arguments, decoding, engine_for, write
from gpu_worker.config import Dtype

DTYPES: tuple[Dtype, ...] = tuple(dtype for dtype in get_args(Dtype) if dtype != "auto")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    options, load = parser.parse_args(), os.getloadavg()[0]
    taken: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in options.dtypes}
    for _ in range(options.blocks + 1):
        for dtype in options.dtypes:
            with engine_for(options, options.steps + 64, dtype) as engine:
                times = [time.process_time()]
                decoding(engine, options, options.steps + 64)
                times.append(time.process_time())
                for _ in range(options.steps):
                    engine.step()
                times.append(time.process_time())
                taken[dtype].append((times[1] - times[0], 1e3 * (times[2] - times[1]) / options.steps))
    found = {}
    for dtype, (_, *counted) in taken.items():
        prefill, step = map(Spread.of, zip(*counted, strict=True))
        found[dtype] = {"prefill_cpu_s": asdict(prefill), "step_cpu_ms": asdict(step)}
        print(f"{dtype}: prefill {prefill.median:.2f} s of a processor, a step {step.median:.2f} ms")
    if options.json is not None:
        write("benchmarks.dtypes", options, load, engine, {"dtypes": found})


if __name__ == "__main__":
    main()
