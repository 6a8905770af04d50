"""What a process logs, and how: to stderr, a line each."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Literal, TextIO

from carrel.process.options import option
from carrel.process.pipe import has_room


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """How much is logged."""

    log_level: Literal["debug", "info", "warning", "error"] = option(
        "warning", "debug, info, warning or error", metavar="LEVEL"
    )


def log_to_stderr(level: str = "warning") -> None:
    """From now on; a second call has no effect. level: of `LogOptions`."""
    logging.basicConfig(
        handlers=[LineHandler(sys.stderr)],
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


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
            print(f"{lost} lines of the log were not read in time", file=self.stream, flush=True)
        super().emit(record)
