"""Events that a process reports to its supervisor, or a person, while it starts and runs; and their reader."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TextIO

from carrel.process.log_lines import LogFormat, has_room, json_line
from carrel.process.log_lines import is_json as is_json_log


class ProcessEvents:
    """One JSON object a line on stdout for a supervisor, or lines on stderr: of text that begin with the process's
    name, or as JSON lines of the log look.

    `out` takes the place of stdout or stderr. What nobody reads is left out: nobody is waited for.
    """

    def __init__(
        self, process: str, is_json: bool, out: TextIO | None = None, log_format: LogFormat = "text"
    ) -> None:
        """log_format: of lines on stderr."""
        self._process = process
        self._is_json = is_json
        self._out = out or (sys.stdout if is_json else sys.stderr)
        self._logs_json = is_json_log(log_format)

    def progress(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of a stage; as text only the stage's end is told."""
        text = f"{stage}: done" if done >= total else ""
        self._write({"event": "progress", "stage": stage, "done": done, "total": total}, text)

    def ready(self, where: str) -> None:
        """Requests are taken from now on."""
        self._write({"event": "ready"}, f"ready on {where}")

    def status(self, text: str) -> None:
        """One line about what the process does."""
        self._write({"event": "status", "text": text}, text)

    def _write(self, event: dict[str, str | int], text: str) -> None:
        line = json.dumps(event) if self._is_json else text and self._line(text)
        if not line or not has_room(self._out):
            return
        try:
            print(line, file=self._out, flush=True)
        except BrokenPipeError:
            # The reader is gone, and this process ends with its parent; say so where it may still be read.
            print(f"{self._process}: its events are not read", file=sys.stderr)

    def _line(self, text: str) -> str:
        return json_line(self._process, "INFO", text) if self._logs_json else f"{self._process}: {text}"


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units of a stage of loading; a total of 0 means unknown."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Status:
    """One line about the load of the last seconds; an idle process sends none."""

    text: str


@dataclass(frozen=True)
class Output:
    """A line that is no event: shown as it is."""

    text: str


Event = Progress | Status | Output


def parse_event(line: str) -> Event | None:
    """Read one line; None for "ready", on which a health check has the last word.

    What is no well-formed event comes back as `Output`: no child can break us.
    """
    try:
        record = json.loads(line)
        kind = record["event"]
        if kind == "progress":
            return Progress(str(record["stage"]), int(record["done"]), int(record["total"]))
        if kind == "ready":
            return None
        if kind == "status":
            return Status(str(record["text"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Output(line)
    return Output(line)
