"""Refusals before anything is started, by the processes' own checks: they need libraries that are not loaded here."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO

from carrel.process.options import OptionError
from carrel.serve.process import ChildSpec

POLL_S = 0.05
UNUSABLE_EXIT_CODE = 2


def run_checks(specs: Sequence[ChildSpec], environment: Mapping[str, str]) -> None:
    """Run these programs side by side, and return when all have ended.

    Raises OptionError with the last line of the first program that refuses. Any other failure is ignored here: the
    process that the program checks for will report it.
    """
    with ExitStack() as stack:
        running = [stack.enter_context(_running(spec, environment)) for spec in specs]
        while running:
            for check, errors in list(running):
                if (code := check.poll()) is None:
                    continue
                running.remove((check, errors))
                if code == UNUSABLE_EXIT_CODE:
                    raise OptionError(_reason(errors))
            time.sleep(POLL_S)


@contextmanager
def _running(
    spec: ChildSpec, environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A program, killed at the end, and what it writes to stderr: a file, for a pipe without a reader could fill up."""
    with tempfile.TemporaryFile() as errors:
        check = subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**environment, **spec.environment},
        )
        try:
            yield check, errors
        finally:
            check.kill()
            check.wait()


def _reason(errors: IO[bytes]) -> str:
    """The last line, without the program's name."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    return lines[-1].partition(": ")[2] if lines else "a check of the options failed without a reason"
