"""Shows how far an evaluation is: a bar on a terminal, a line per cell elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from carrel.errors import EvaluationError
from carrel.evaluation.cells import Cell
from carrel.evaluation.record import Report
from carrel.tables import interval


class RunProgress:
    """The progress of a whole run on stderr, shown from its construction until `close`."""

    def __init__(self, console: Console, report: Report, num_cells: int, num_documents: int) -> None:
        self._console = console
        self._report = report
        self._num_documents = num_documents
        self._num_done: dict[Cell, int] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("documents", total=num_cells * num_documents)
        self._bar.start()

    def cell(self, cell: Cell, done: int, total: int) -> None:
        self._num_done[cell] = done
        self._bar.update(self._task, description=cell.name, completed=sum(self._num_done.values()))

    def finished(self, cell: Cell) -> None:
        result = self._report.result(cell)
        shown = interval(result.exact_match, result.low, result.high, 2)
        if result.score is not None:
            shown = f"score {result.score.text()}, right {shown}"
        self._console.print(f"{cell.name}: {shown} of {result.n}", highlight=False)

    def left_out(self, cell: Cell, reason: EvaluationError) -> None:
        self.cell(cell, self._num_documents, self._num_documents)
        self._console.print(f"left out: {reason}", highlight=False)

    def round(self, number: int, total: int) -> None:
        if total > 1:
            self._console.print(f"round {number} of {total} is done", highlight=False)

    def out_of_time(self) -> None:
        self._console.print("out of time: what was not asked stays out", highlight=False)

    def close(self) -> None:
        self._bar.stop()
