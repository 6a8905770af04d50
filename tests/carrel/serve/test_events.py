"""Lines from children: events are read, anything else is shown, nothing raises."""

from __future__ import annotations

import pytest

from carrel.serve.events import Event, Output, Progress, Ready, Status, parse_event


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (
            '{"event": "progress", "stage": "load weights", "done": 3, "total": 10}',
            Progress("load weights", 3, 10),
        ),
        ('{"event": "ready"}', Ready()),
        ('{"event": "status", "text": "2 running"}', Status("2 running")),
    ],
)
def test_events(line: str, event: Event) -> None:
    assert parse_event(line) == event


@pytest.mark.parametrize(
    "line",
    ["", "plain words", "[]", "7", '{"event": "progress", "stage": 1}', '{"event": "new"}', "[" * 5000],
)
def test_anything_else_is_output(line: str) -> None:
    assert parse_event(line) == Output(line)
