"""The provenance of a result: command, machine, versions, commit and date."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from typing import Any

from carrel.evaluation.about import describe
from carrel.machine import gpus


def about(
    argv: Sequence[str], device: str, commit: str | None = None, load_average: float | None = None
) -> dict[str, Any]:
    """argv: the arguments of `carrel bench`. commit: for where git is missing. load_average: of the last minute before
    the run; None: it has not begun yet. Creates no CUDA context."""
    found = describe(device)
    found["command"] = shlex.join(["carrel", "bench", *argv])
    found["commit"] = found["versions"]["commit"] = commit or found["versions"]["commit"]
    found["load_average_before"] = round(os.getloadavg()[0] if load_average is None else load_average, 2)
    machine = found["machine"]
    machine["device"] = machine.get("gpu", machine["cpu"])
    machine["python"] = platform.python_version()
    for package in ("torch", "triton"):
        machine[package] = found["versions"].get(package)
    machine["driver"] = next(iter(gpus("driver_version")), "unknown") if device.startswith("cuda") else None
    return found
