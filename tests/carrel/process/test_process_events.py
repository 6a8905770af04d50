"""Test what a process reports to its supervisor: JSON that `carrel serve` reads, or text for a person."""

from __future__ import annotations

import io
import json
import os

import pytest

from carrel.process.events import Output, ProcessEvents, Progress, Status, parse_event


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def tell_all(events: ProcessEvents) -> None:
    events.progress("load weights", 1, 2)
    events.progress("load weights", 2, 2)
    events.ready("unix:/x")
    events.status("running 1")


def test_json_is_what_the_supervisor_reads(capsys: pytest.CaptureFixture[str]) -> None:
    tell_all(ProcessEvents("kv_store", is_json=True))
    assert [parse_event(line) for line in capsys.readouterr().out.splitlines()] == [
        Progress("load weights", 1, 2),
        Progress("load weights", 2, 2),
        None,
        Status("running 1"),
    ]


def test_text_names_the_process_and_tells_the_end_of_a_stage() -> None:
    out = io.StringIO()
    tell_all(ProcessEvents("gateway", is_json=False, out=out))
    assert out.getvalue().splitlines() == [
        "gateway: load weights: done",
        "gateway: ready on unix:/x",
        "gateway: running 1",
    ]


def test_where_the_log_is_json_so_are_they(capsys: pytest.CaptureFixture[str]) -> None:
    tell_all(ProcessEvents("gateway", is_json=False, log_format="auto"))
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [each["message"] for each in told] == ["load weights: done", "ready on unix:/x", "running 1"]
    assert {(each["process"], each["level"]) for each in told} == {("gateway", "INFO")}


def test_a_supervisor_that_is_gone_breaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    ProcessEvents("kv_store", is_json=True, out=ClosedPipe()).status("running 1")
    assert "kv_store: its events are not read" in capsys.readouterr().err


def test_a_supervisor_that_hangs_holds_up_nobody() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as out, os.fdopen(reading) as supervisor:
        events = ProcessEvents("gpu_worker", is_json=True, out=out)
        # Many times what a pipe holds.
        for number in range(20_000):
            events.status(f"running {number}")
        assert parse_event(supervisor.readline().rstrip("\n")) == Status("running 0")
        out.close()
        assert all(parse_event(line.rstrip("\n")) for line in supervisor)


@pytest.mark.parametrize(
    "line",
    ["", "plain words", "[]", "7", '{"event": "progress", "stage": 1}', '{"event": "new"}', "[" * 5000],
)
def test_anything_else_is_output(line: str) -> None:
    assert parse_event(line) == Output(line)
