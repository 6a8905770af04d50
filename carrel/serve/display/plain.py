"""For logs and pipes: one line for each thing that happens."""

from __future__ import annotations

import time

from rich.console import Console

from carrel.serve.display.base import Display
from carrel.serve.events import Progress

STATUS_INTERVAL_S = 10.0
# steps of a stage that are worth a line
QUARTERS = 4


class PlainDisplay(Display):
    """Prints stages by quarters and a status line at most every ten seconds for each process."""

    def __init__(self, console: Console, is_verbose: bool = False, errors: Console | None = None) -> None:
        super().__init__(console, is_verbose, errors)
        self._quarters: dict[tuple[str, str], int] = {}
        self._last_status: dict[str, float] = {}

    def starting(self, child: str) -> None:
        super().starting(child)
        self.message(f"{child}: starting")

    def progress(self, child: str, progress: Progress) -> None:
        quarter = QUARTERS * progress.done // progress.total if progress.total > 0 else 0
        if self._quarters.get((child, progress.stage)) != quarter:
            self._quarters[child, progress.stage] = quarter
            of_total = f" {progress.done}/{progress.total}" if progress.total > 0 else ""
            self.message(f"{child}: {progress.stage}{of_total}")

    def ready(self, child: str) -> None:
        super().ready(child)
        self.message(f"{child}: ready")

    def status(self, child: str, text: str) -> None:
        now = time.monotonic()
        if now - self._last_status.get(child, -STATUS_INTERVAL_S) >= STATUS_INTERVAL_S:
            self._last_status[child] = now
            self.message(f"{child}: {text}")

    def close(self) -> None:
        """Nothing to restore."""
