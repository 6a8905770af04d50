"""Runs `python -m gpu_worker.calibration` and shows its progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from carrel.serve.one_shot import run_to_end
from carrel.serve.process import ChildSpec
from carrel.serve.runtime_dir import runtime_dir
from carrel.serve.signals import sigterm_as_interrupt


def calibrate(
    model: str,
    samples: Sequence[Sequence[int]],
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    notes: Console,
) -> list[str]:
    """Run the calibrating process and return its lines. Main thread only.

    flags: of `python -m gpu_worker.calibration`; those that are None are left out. SIGTERM ends it as Ctrl-C does.
    Raises ChildError with the process's own words.
    """
    with runtime_dir() as folder, sigterm_as_interrupt():
        path = folder / "samples.jsonl"
        path.write_text("".join(f"{json.dumps(list(sample))}\n" for sample in samples))
        return run_to_end(_spec(model, path, flags), environment, notes)


def _spec(model: str, samples: Path, flags: Mapping[str, object]) -> ChildSpec:
    given = [text for name, value in flags.items() if value is not None for text in (name, str(value))]
    # -P: a folder of the same name where the user stands is not taken for ours
    command = (sys.executable, "-P", "-m", "gpu_worker.calibration", model, "--samples", str(samples))
    return ChildSpec("calibration", (*command, *given, "--json-events"), lambda: True, 0, 0)
