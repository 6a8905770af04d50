"""Logging of a process: to stderr, one line a record."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from dataclasses import dataclass
from typing import Literal, TextIO

from carrel.process.log_lines import JSONLines, LogFormat, TextLines, has_room, is_json
from carrel.process.options import option

FORMAT_HELP = "json: an object a line, with ids of request and trace; text; or auto: text on a terminal"


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """How much is logged."""

    log_level: Literal["debug", "info", "warning", "error"] = option(
        "warning", "debug, info, warning or error", metavar="LEVEL"
    )
    log_format: LogFormat = option("auto", FORMAT_HELP, metavar="FORMAT")


def log_to_stderr(
    process: str,
    level: str = "warning",
    log_format: LogFormat = "auto",
    hides_error_texts: bool = False,
    stream: TextIO | None = None,
) -> None:
    """From now on; a second call has no effect. level, log_format: of `LogOptions`. hides_error_texts: see
    `TextLines`. stream: in place of this process's stderr."""
    stream = stream or sys.stderr
    as_json = is_json(log_format, stream)
    handler = LineHandler(stream)
    handler.setFormatter(JSONLines(process, hides_error_texts) if as_json else TextLines(hides_error_texts))
    logging.basicConfig(handlers=[handler], level=level.upper())


def share_stderr() -> int:
    """Let other processes of this user log to this one's stderr, by the id that is returned. Where it is a file every
    line goes to its end from now on."""
    stderr = 2
    fcntl.fcntl(stderr, fcntl.F_SETFL, fcntl.fcntl(stderr, fcntl.F_GETFL) | os.O_APPEND)
    return os.getpid()


def stderr_of(pid: int) -> TextIO | None:
    """Open the stderr of a process that shares it, for whole lines; None where that is not possible."""
    try:
        return open(f"/proc/{pid}/fd/2", "a", buffering=1, encoding="utf-8", errors="replace")
    except OSError:
        return None


class LineHandler(logging.StreamHandler[TextIO]):
    """Waits for nobody: where the lines are not read, they are left out, and counted in the next that is."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not has_room(self.stream):
            self._num_lost += 1
            return
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            text = f"{lost} lines of the log were not read in time"
            super().emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))
        super().emit(record)
