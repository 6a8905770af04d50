"""Refusals before anything is started, by the processes' own checks: they need libraries that are not loaded here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from carrel.process.options import OptionError
from carrel.serve.process import Child, ChildSpec

POLL_S = 0.05
UNUSABLE_EXIT_CODE = 2


def run_checks(specs: Sequence[ChildSpec], environment: Mapping[str, str]) -> None:
    """Run these programs side by side, and return when all have ended. Main thread only.

    Raises OptionError with the last line of the first program that refuses, without its name. Any other failure is
    ignored here: the process that the program checks for will report it.
    """
    running: list[Child] = []
    try:
        for spec in specs:
            running.append(Child(spec, environment, SimpleQueue()))
        while running:
            for check in list(running):
                if (code := check.exit_code()) is None:
                    continue
                running.remove(check)
                if code == UNUSABLE_EXIT_CODE:
                    lines = check.last_lines() or ("check: a check of the options failed without a reason",)
                    raise OptionError(lines[-1].partition(": ")[2])
            time.sleep(POLL_S)
    finally:
        for check in running:
            check.kill()
