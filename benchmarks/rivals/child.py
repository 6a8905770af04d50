"""`python -m benchmarks.rivals.child decode|prefill NAME`: a rival with all its cases, in this process.

Stdin: {"shape", "device", "cases"} as JSON. Stdout: a line of JSON for each case, {"figures"} or {"error"}, as it ends.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

import torch

from benchmarks.device import release
from benchmarks.errors import NotMeasurable
from benchmarks.figures import revive
from benchmarks.rivals import CONTESTS
from benchmarks.shapes import SHAPES


def main(kind: str, name: str) -> None:
    # what a library prints must not mix with the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = json.loads(sys.stdin.read())
    contest = CONTESTS[kind]
    cases = [revive(contest.case, fields) for fields in task["cases"]]
    device = torch.device(task["device"])
    try:
        made = contest.rivals[name].load()(SHAPES[task["shape"]], device)
    except (NotMeasurable, torch.OutOfMemoryError) as exc:
        for _ in cases:
            _tell(answers, {"error": _in_a_line(exc)})
        return
    measure_all(made.measure, cases, device, answers)


def measure_all(
    measure: Callable[[Any], Any], cases: Sequence[Any], device: torch.device, answers: TextIO
) -> None:
    """A case that does not fit, cannot be measured or fails is told, and the next one is tried."""
    for case in cases:
        try:
            answer: dict[str, Any] = {"figures": asdict(measure(case))}
        except (NotMeasurable, torch.OutOfMemoryError) as exc:
            answer = {"error": _in_a_line(exc)}
        except Exception:
            answer = {"error": traceback.format_exc().strip()}
        # behind the handler, whose exception holds the frames and so their tensors
        release(device)
        _tell(answers, answer)


def _in_a_line(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of device memory"
    return str(error).partition("\n")[0]


def _tell(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
