"""`python -m benchmarks.cpu_vs_transformers`: time to first token, decode step and peak memory on a CPU.

Every rival gets the same model, prompts, float32 and threads, in fresh processes; the order turns from round to round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.figures import write_json
from benchmarks.report import cpu_tables
from benchmarks.rivals import RIVALS
from benchmarks.runs import Run, Task, agreement, summarize
from carrel.evaluation.about import describe, hash_files, model_files
from carrel.evaluation.suite import ANSWER_TOKENS, Library, Suite
from carrel.process.version import CHECKOUT

RESULT = CHECKOUT / "benchmarks" / "results" / "cpu_vs_transformers.json"
BASELINE = "transformers generate"
PROCESS_TIMEOUT_S = 1200
BUSY_LOAD = 0.5
# of Carrel's dense policy against the baseline
TARGETS = {"ttft": 1.3, "step": 1.2}


def make_prompts(
    model: Path, books: Path | None, length: int, count: int, seed: int
) -> list[tuple[int, ...]]:
    """`count` prompts of exactly `length` tokens: documents with questions, or random tokens without books."""
    if books is None:
        rng = Random(f"{seed}:{length}")
        return [tuple(rng.randrange(16, 4096) for _ in range(length)) for _ in range(count)]
    suite = Suite(model, Library(books), seed)
    prompts = []
    for index in range(count):
        question = suite.question("mixed", length + 2 * ANSWER_TOKENS, index)
        # cut out of the document, so that the prompt is of the exact length and still ends in the question
        room = length - len(question.question_ids)
        prompts.append(question.context_ids[: room - 1] + question.context_ids[-1:] + question.question_ids)
    return prompts


def run_rival(name: str, task: Task, timeout_s: float = PROCESS_TIMEOUT_S) -> Run:
    """One fresh process. Raises RuntimeError with its last words when it fails."""
    threads = str(task.num_threads)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
    }
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.rivals", name],
        input=task.to_json(),
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        env=environment,
        timeout=timeout_s,
    )
    if found.returncode:
        raise RuntimeError(f"{name} ended with {found.returncode}: {found.stderr[-2000:]}")
    return Run.from_json(found.stdout.splitlines()[-1])


def measure(
    rivals: Sequence[str],
    model: Path,
    prompts: dict[int, list[tuple[int, ...]]],
    rounds: int,
    steps: int,
    threads: int,
) -> dict[tuple[str, int], list[Run]]:
    """Runs by rival and length; each round takes the next share of a length's prompts."""
    runs: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for turn in range(rounds):
        order = [*rivals[turn % len(rivals) :], *rivals[: turn % len(rivals)]]
        for length, made in prompts.items():
            task = Task(str(model), tuple(made[turn::rounds]), steps, threads)
            for name in order:
                run = run_rival(name, task)
                runs[name, length].append(run)
                timing = summarize([run])
                shown = f"first token {timing.ttft_ms:.0f} ms, step {timing.step_ms:.2f} ms, {run.peak_mib:.0f} MiB"
                print(f"round {turn + 1}/{rounds}, {length} tokens, {name}: {shown}", file=sys.stderr)
    return dict(runs)


def report(runs: dict[tuple[str, int], list[Run]]) -> dict[str, Any]:
    """Timings, ratios to the baseline, and whether the targets are met."""
    timings = {key: summarize(of_key) for key, of_key in runs.items()}
    rows = []
    for (name, length), timing in timings.items():
        row = asdict(timing)
        baseline = timings.get((BASELINE, length))
        if baseline is not None:
            row["ttft_ratio"] = timing.ttft_ms / baseline.ttft_ms
            row["step_ratio"] = timing.step_ms / baseline.step_ms
            row["peak_ratio"] = timing.peak_mib / baseline.peak_mib
            row["same_answers"] = agreement(runs[name, length], runs[BASELINE, length])
        rows.append(row)
    return {"baseline": BASELINE, "targets": TARGETS, "timings": rows}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_vs_transformers", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKOUT / "models" / "carrel-nano", metavar="DIR")
    parser.add_argument(
        "--books", type=Path, default=None, metavar="DIR", help="without: random tokens as prompts"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192], metavar="N")
    parser.add_argument("--rivals", nargs="+", choices=list(RIVALS), default=list(RIVALS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="processes per rival and length")
    parser.add_argument("--prompts", type=int, default=2, metavar="N", help="per process")
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="decode steps per prompt, from 2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, default=RESULT, metavar="FILE")
    options = parser.parse_args(argv)
    model = options.model.resolve()
    count = options.rounds * options.prompts
    prompts = {
        length: make_prompts(model, options.books, length, count, options.seed) for length in options.lengths
    }
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print(f"the load average is {load:.1f}: other processes will spoil the times", file=sys.stderr)
    runs = measure(options.rivals, model, prompts, options.rounds, options.steps, options.threads)
    about = describe("cpu")
    about["command"] = " ".join(["python -m benchmarks.cpu_vs_transformers", *(argv or sys.argv[1:])])
    about |= {
        "model_sha256": hash_files(model_files(model)),
        "prompts": "held-out books" if options.books else "random tokens",
        "threads": options.threads,
        "steps": options.steps,
        "load_average_before": load,
    }
    content = {"about": about, **report(runs)}
    write_json(options.json, content)
    print(cpu_tables(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
