"""Programs that the doctor runs, so that `carrel` itself loads no large library."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from carrel.process.version import CHECKOUT

# of the ten seconds that a report may take
TIMEOUT_S = 9.0


@dataclass(frozen=True)
class Ended:
    """A program that has ended. error: the last line of its stderr. timed_out: it was killed after TIMEOUT_S."""

    code: int
    output: str = ""
    error: str = ""
    timed_out: bool = False


def run_python(*words: str) -> Ended:
    """Run this Python with these words. Options reach it as words only, and no library may use the network."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("CARREL_")}
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    environment = {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", *words]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Ended(1, error=f"no answer within {TIMEOUT_S:g} s", timed_out=True)
    lines = ended.stderr.strip().splitlines() or [f"ended with {ended.returncode}"]
    return Ended(ended.returncode, ended.stdout, lines[-1])
