"""What a process tells its supervisor on stdout, one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units of a stage of loading; a total of 0 means unknown."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """The process says that it serves; its health check has the last word."""


@dataclass(frozen=True)
class Status:
    """One line about the load of the last seconds; an idle process sends none."""

    text: str


@dataclass(frozen=True)
class Output:
    """A line that is no event: shown as it is."""

    text: str


Event = Progress | Ready | Status | Output


def parse_event(line: str) -> Event:
    """Read one line. What is no well-formed event comes back as `Output`: no child can break us."""
    try:
        record = json.loads(line)
        kind = record["event"]
        if kind == "progress":
            return Progress(str(record["stage"]), int(record["done"]), int(record["total"]))
        if kind == "ready":
            return Ready()
        if kind == "status":
            return Status(str(record["text"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Output(line)
    return Output(line)
