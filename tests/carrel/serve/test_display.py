"""Test what a terminal and a log show."""

from __future__ import annotations

import json
import time
from io import StringIO

import pytest
from rich.console import Console

from carrel.errors import ChildError
from carrel.process.events import Progress
from carrel.serve.display import Display


def console(is_terminal: bool) -> Console:
    return Console(file=StringIO(), width=100, force_terminal=is_terminal)


def seen(display_console: Console) -> str:
    return str(display_console.file.getvalue())  # type: ignore[attr-defined]


@pytest.fixture(params=[True, False], ids=["terminal", "plain"])
def shown(request: pytest.FixtureRequest) -> tuple[Display, Console]:
    target = console(request.param)
    return Display(target, is_verbose=False), target


def test_a_start_an_answer_and_an_end(shown: tuple[Display, Console]) -> None:
    display, target = shown
    for child in ("store", "worker"):
        display.starting(child)
        display.progress(child, Progress("load weights", 0, 4))
        display.progress(child, Progress("load weights", 4, 4))
        display.progress(child, Progress("find cores", 1, 0))
        display.line(child, "held [back]")
        display.ready(child)
        display.status(child, "2 running")
    display.draining()
    display.close()
    text = seen(target)
    assert text.index("held [back]") < text.index("draining")
    assert text.count("held [back]") == 2
    assert "load weights" in text
    assert "2 running" in text


def test_a_failure_is_shown_once_with_its_last_lines(shown: tuple[Display, Console]) -> None:
    display, target = shown
    display.starting("worker")
    display.line("worker", "error: no such model")
    display.failed(ChildError("worker ended with code 2", ("error: no such model",), 2))
    display.close()
    text = seen(target)
    assert "worker ended with code 2" in text
    assert text.count("error: no such model") == 1


def test_verbose_lines_come_at_once() -> None:
    target = console(False)
    display = Display(target, is_verbose=True)
    display.starting("worker")
    display.line("worker", "reading shard 1")
    assert "reading shard 1" in seen(target)


def test_plain_progress_and_status_are_few_lines() -> None:
    target = console(False)
    display = Display(target)
    display.starting("worker")
    for done in range(1001):
        display.progress("worker", Progress("load weights", done, 1000))
        display.status("worker", f"{done} running")
    assert seen(target).count("load weights") == 5
    assert seen(target).count("running") == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_death_is_told_on_the_console_for_errors_and_its_load_is_no_more(is_terminal: bool) -> None:
    target, errors = console(is_terminal), console(False)
    display = Display(target, False, errors)
    display.starting("worker")
    display.ready("worker")
    display.status("worker", "2 running")
    display.lost("worker", "worker ended with [signal] SIGKILL", ["shown as it came"])
    assert seen(errors) == "✗ worker ended with [signal] SIGKILL\n"
    # no bar and no status line is left, but for what others do
    before = seen(target)
    time.sleep(0.6)
    assert "2 running" not in seen(target)[len(before) :]
    display.starting("worker")
    display.line("worker", "no room")
    display.lost("worker", "worker ended with code 2", ["no room"])
    display.close()
    assert seen(target).count("no room") == 1
    assert "shown as it came" not in seen(target)


def test_lines_of_json_are_passed_on_and_others_made_into_such() -> None:
    target, errors = console(is_terminal=True), console(is_terminal=True)
    display = Display(target, is_verbose=False, errors=errors, as_json=True)
    own = '{"time": "2026-01-01T00:00:00.000Z", "message": "[ok] ' + "x" * 200 + '"}'
    display.starting("store")
    display.progress("store", Progress("load weights", 4, 4))
    display.line("store", own)
    display.line("store", "Ray says\x1b[1m hello")
    display.ready("store")
    display.show("a banner")
    display.status("store", "2 running")
    display.lost("store", "store died", ["its last line"])
    display.failed(ChildError("store is gone", ["why"]))
    display.close()
    lines = seen(target).splitlines()
    assert own in lines
    told = [json.loads(line) for line in lines if line != own]
    assert [(each["process"], each["message"]) for each in told] == [
        ("carrel", "store: starting"),
        ("carrel", "store: load weights 4/4"),
        ("store", "Ray says\x1b[1m hello"),
        ("carrel", "store: ready"),
        ("carrel", "store: 2 running"),
        ("carrel", "store is gone"),
    ]
    assert told[-1]["error"] == "why"
    assert json.loads(seen(errors))["message"] == "store died"
