"""A process logs to stderr, as much as it was told to."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys

import pytest
from waiting import PATIENCE

from carrel.process.log_lines import JSONLines, TextLines, is_json
from carrel.process.logs import LineHandler
from carrel.process.request_context import RequestContext, rename_request, working_for
from carrel.process.trace_context import TraceContext

PROGRAM = """
import logging, sys
from carrel.process.logs import log_to_stderr
log_to_stderr("gateway", *sys.argv[1:])
for level in ("debug", "info", "warning", "error"):
    getattr(logging.getLogger("a.module"), level)("seen")
"""


@pytest.mark.parametrize(
    ("arguments", "levels"),
    [([], ["WARNING", "ERROR"]), (["debug", "text"], ["DEBUG", "INFO", "WARNING", "ERROR"])],
)
def test_lines_of_the_level_and_above_go_to_stderr(arguments: list[str], levels: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    if "text" in arguments:
        assert [line.split()[2:] for line in lines] == [[level, "a.module:", "seen"] for level in levels]
    else:
        # a pipe is no terminal
        told = [json.loads(line) for line in lines]
        assert [(each["level"], each["logger"], each["message"], each["process"]) for each in told] == [
            (level, "a.module", "seen", "gateway") for level in levels
        ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_text_on_a_terminal_unless_told() -> None:
    assert [is_json("auto", stream) for stream in (Terminal(), io.StringIO())] == [False, True]
    assert is_json("json", Terminal())
    assert not is_json("text", io.StringIO())


def record(text: str, *values: object, error: BaseException | None = None) -> logging.LogRecord:
    told = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("a.module", logging.ERROR, "file", 1, text, values, told)


def test_a_line_of_json_says_whose_work_it_was() -> None:
    lines = JSONLines("gpu_worker")
    assert "request_id" not in json.loads(lines.format(record("of nobody")))
    trace = TraceContext("a" * 32, "b" * 16)
    with working_for(RequestContext("r1", trace)):
        told = json.loads(lines.format(record("two\nlines, %d", 7)))
        with working_for(RequestContext("r2")):
            assert "trace_id" not in json.loads(lines.format(record("another")))
        rename_request("own")
        renamed = json.loads(lines.format(record("the same")))
    assert (renamed["request_id"], renamed["trace_id"]) == ("own", "a" * 32)
    assert "request_id" not in json.loads(lines.format(record("of nobody")))
    assert told["message"] == "two\nlines, 7"
    assert (told["request_id"], told["trace_id"]) == ("r1", "a" * 32)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told["time"])


PROMPT = " ".join(["my", "secret", "prompt"])


def failed() -> ValueError:
    """As a library does that was given a prompt."""
    try:
        try:
            raise KeyError(PROMPT)
        except KeyError as cause:
            raise ValueError(f"cannot encode {PROMPT!r}") from cause
    except ValueError as error:
        return error


@pytest.mark.parametrize("lines", [JSONLines("gateway", True), TextLines(True)], ids=["json", "text"])
def test_an_error_that_may_quote_a_prompt_is_told_by_its_type_and_place(lines: logging.Formatter) -> None:
    told = lines.format(record("a bug", error=failed()))
    assert PROMPT not in told
    assert told.index("KeyError") < told.index("ValueError")
    assert "test_logs.py" in told


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
