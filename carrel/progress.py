"""How far a command is: a bar on a terminal, a line per result elsewhere. All on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class RunProgress:
    """The progress of one command. `doing` names what runs now, `done` tells a result and moves the bar."""

    def __init__(self, total: int | None, console: Console | None = None) -> None:
        """total: steps of the bar; None: not known yet."""
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def doing(self, what: str, completed: int | None = None, total: int | None = None) -> None:
        """Name what runs now. completed, total: where the bar is; None: as before."""
        self._bar.update(self._task, description=what, completed=completed, total=total)

    def done(self, result: str) -> None:
        self.tell(result)
        self.advance()

    def tell(self, result: str) -> None:
        self._console.print(result, highlight=False, markup=False, soft_wrap=True)

    def advance(self) -> None:
        self._bar.advance(self._task)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
