"""How a line of the log looks, text for people or one JSON object for programs, and whether it can be written."""

from __future__ import annotations

import io
import json
import logging
import select
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from carrel.process.request_context import current_request

LogFormat = Literal["auto", "json", "text"]


def is_json(log_format: LogFormat, stream: TextIO | None = None) -> bool:
    """Return whether lines are JSON: auto is text on a terminal. stream: stderr, unless given."""
    return log_format == "json" or (log_format == "auto" and not (stream or sys.stderr).isatty())


def json_line(process: str, level: str, message: str, time: float | None = None, **more: str) -> str:
    """One line. time: Unix time in seconds; None: now. more: fields that come last, where they are not empty."""
    at = datetime.now(UTC) if time is None else datetime.fromtimestamp(time, UTC)
    line = {
        "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level,
        "process": process,
        "message": message,
        **{name: text for name, text in more.items() if text},
    }
    return json.dumps(line, ensure_ascii=False)


class TextLines(logging.Formatter):
    """The time, the level, the module, the message; an error's traceback below it."""

    def __init__(self, hides_error_texts: bool = False) -> None:
        """hides_error_texts: of an exception the traceback and type are told, but not what it says, which may quote a
        client."""
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._hides_error_texts = hides_error_texts

    def formatException(self, ei: Any) -> str:
        return _without_texts(ei[1]) if self._hides_error_texts and ei[1] else super().formatException(ei)


class JSONLines(TextLines):
    """The same as one object, with `request_id` and `trace_id` of the current request."""

    def __init__(self, process: str, hides_error_texts: bool = False) -> None:
        super().__init__(hides_error_texts)
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        request = current_request()
        trace = None if request is None else request.trace
        return json_line(
            self._process,
            record.levelname,
            record.getMessage(),
            record.created,
            logger=record.name,
            request_id="" if request is None else request.request_id,
            trace_id="" if trace is None else trace.trace_id,
            error=self.formatException(record.exc_info) if record.exc_info else "",
        )


def _without_texts(error: BaseException) -> str:
    """Its frames and its type, behind those of what caused it."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = "" if cause is None else f"{_without_texts(cause)}\n\nand then\n\n"
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{before}{frames}{type(error).__qualname__} (its text is left out: it may quote a client)"


def has_room(stream: TextIO) -> bool:
    """Return whether a line of less than 4 KiB can be written at once.

    False where a pipe is full: its reader hangs, and must not hold up this process too. True for a closed pipe, so
    that writing to it raises.
    """
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
    except (io.UnsupportedOperation, ValueError, AttributeError):
        # No file, but memory.
        return True
    return bool(poll.poll(0))
