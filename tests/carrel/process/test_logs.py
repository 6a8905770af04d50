"""A process logs to stderr, as much as it was told to."""

from __future__ import annotations

import subprocess
import sys

import pytest
from waiting import PATIENCE

PROGRAM = """
import logging, sys
from carrel.process.logs import log_to_stderr
log_to_stderr(*sys.argv[1:])
for level in ("debug", "info", "warning", "error"):
    getattr(logging.getLogger("a.module"), level)("seen")
"""


@pytest.mark.parametrize(
    ("arguments", "levels"),
    [([], ["WARNING", "ERROR"]), (["debug"], ["DEBUG", "INFO", "WARNING", "ERROR"]), (["error"], ["ERROR"])],
)
def test_lines_of_the_level_and_above_go_to_stderr(arguments: list[str], levels: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == ""
    assert [line.split()[2:] for line in done.stderr.splitlines()] == [
        [level, "a.module:", "seen"] for level in levels
    ]
