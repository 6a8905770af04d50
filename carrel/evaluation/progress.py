"""Shows how far an evaluation is: a bar on a terminal, a line per cell elsewhere."""

from __future__ import annotations

from rich.console import Console

from carrel.errors import EvaluationError
from carrel.evaluation.cells import Cell
from carrel.evaluation.record import Report
from carrel.progress import RunProgress
from carrel.tables import interval


class CellProgress(RunProgress):
    """The progress of a whole run."""

    def __init__(self, console: Console, report: Report, num_cells: int, num_documents: int) -> None:
        super().__init__(num_cells * num_documents, console)
        self._report = report
        self._num_documents = num_documents
        self._num_done: dict[Cell, int] = {}

    def cell(self, cell: Cell, done: int) -> None:
        self._num_done[cell] = done
        self.doing(cell.name, sum(self._num_done.values()))

    def finished(self, cell: Cell) -> None:
        result = self._report.result(cell)
        shown = interval(result.exact_match, result.low, result.high, 2)
        if result.score is not None:
            shown = f"score {result.score.text()}, right {shown}"
        self.tell(f"{cell.name}: {shown} of {result.n}")

    def left_out(self, cell: Cell, reason: EvaluationError) -> None:
        self.cell(cell, self._num_documents)
        self.tell(f"left out: {reason}")

    def round(self, number: int, total: int) -> None:
        if total > 1:
            self.tell(f"round {number} of {total} is done")
