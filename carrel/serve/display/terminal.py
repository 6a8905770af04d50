"""For a terminal: progress bars while loading, then one status line that is rewritten in place."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from carrel.errors import ChildError
from carrel.serve.display.base import Display
from carrel.serve.events import Progress as ProgressEvent

# a status older than this is of an idle server: the line goes away
STATUS_AGE_S = 10.0


class TerminalDisplay(Display):
    """Bars for the stages of each starting process; a status line while there is load; nothing when idle."""

    def __init__(self, console: Console, is_verbose: bool = False, errors: Console | None = None) -> None:
        super().__init__(console, is_verbose, errors)
        self._bars = Progress(
            TextColumn("{task.description:<30}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._status: dict[str, tuple[float, str]] = {}
        self._live = Live(
            console=console, get_renderable=self._status_line, refresh_per_second=2, transient=True
        )

    def starting(self, child: str) -> None:
        super().starting(child)
        self._live.stop()
        self._bars.start()
        self._tasks[child, ""] = self._bars.add_task(f"{child}: starting", total=None)

    def progress(self, child: str, progress: ProgressEvent) -> None:
        key = (child, progress.stage)
        total = progress.total or None
        if key not in self._tasks:
            # one bar for each process: its present stage
            self._remove_bars(child)
            self._tasks[key] = self._bars.add_task(escape(f"{child}: {progress.stage}"), total=total)
        self._bars.update(self._tasks[key], completed=progress.done, total=total)

    def ready(self, child: str) -> None:
        self._end_bars(child)
        super().ready(child)
        self.message(f"✓ {child}")

    def lost(self, child: str, text: str, lines: Sequence[str]) -> None:
        # a dead process has no load
        self._status.pop(child, None)
        self._end_bars(child)
        super().lost(child, text, lines)

    def status(self, child: str, text: str) -> None:
        self._status[child] = (time.monotonic(), text)
        # a terminal takes one live picture at a time
        if not self._bars.live.is_started:
            self._live.start()

    def draining(self) -> None:
        self._bars.stop()
        super().draining()

    def failed(self, error: ChildError) -> None:
        self._bars.stop()
        super().failed(error)

    def close(self) -> None:
        self._bars.stop()
        self._live.stop()

    def _end_bars(self, child: str) -> None:
        self._remove_bars(child)
        if not self._tasks:
            self._bars.stop()

    def _remove_bars(self, child: str) -> None:
        for key in [key for key in self._tasks if key[0] == child]:
            self._bars.remove_task(self._tasks.pop(key))

    def _status_line(self) -> Text:
        now = time.monotonic()
        fresh = [text for at, text in self._status.values() if now - at < STATUS_AGE_S]
        return Text(" · ".join(fresh), style="cyan", no_wrap=True, overflow="ellipsis")
