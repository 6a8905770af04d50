"""What a process logs, and how: to stderr, a line each."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Literal

from carrel.process.options import option


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """How much is logged."""

    log_level: Literal["debug", "info", "warning", "error"] = option(
        "warning", "debug, info, warning or error", metavar="LEVEL"
    )


def log_to_stderr(level: str = "warning") -> None:
    """From now on; a second call has no effect. level: of `LogOptions`."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
