"""`python -m benchmarks.rivals NAME`: reads a Task as JSON from stdin, writes a Run as the last line of stdout."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.rivals import rival
from benchmarks.runs import Run, Task

WARM_UP_TOKENS = 512
WARM_UP_STEPS = 4


def main(name: str) -> None:
    task = Task.from_json(sys.stdin.read())
    torch.set_num_threads(task.num_threads)
    length = len(task.prompts[0])
    made = rival(name)(task.model, length + task.num_steps + 1)
    try:
        loaded = resident_mib("VmRSS")
        made.answer(task.prompts[0][:WARM_UP_TOKENS], WARM_UP_STEPS)
        answers = tuple(made.answer(prompt, task.num_steps + 1) for prompt in task.prompts)
    finally:
        made.close()
    print(Run(name, length, answers, loaded, resident_mib("VmHWM")).to_json())


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process. `ru_maxrss` would count the parent's memory before exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


if __name__ == "__main__":
    main(sys.argv[1])
