"""A process logs to stderr, as much as it was told to."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest
from waiting import PATIENCE

from carrel.process.logs import LineHandler

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


def test_lines_that_nobody_reads_are_left_out_and_counted() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as out, os.fdopen(reading, "rb", buffering=0) as reader:
        handler = LineHandler(out)
        record = logging.LogRecord("a", logging.ERROR, "file", 1, "x" * 100, None, None)
        for _ in range(5000):
            handler.emit(record)
        assert reader.read(1 << 20).count(b"\n") > 100
        handler.emit(record)
        lost, line = reader.read(1 << 20).splitlines()
        assert re.fullmatch(rb"\d{4} lines of the log were not read in time", lost)
        assert line == b"x" * 100
