"""The order in which a run asks its questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from carrel.evaluation.cells import Cell


@dataclass(frozen=True)
class Stage:
    """Questions that may run at once: cells that differ in their budgets alone, and pairs of a cell and a document's
    index, the budgets of a document side by side. is_measured: whether attention mass and recall rate are wanted."""

    is_measured: bool
    jobs: tuple[tuple[Cell, int], ...]


@dataclass(frozen=True)
class Order:
    """Rounds of a few documents, and in each the cells one after the other: a run that is cut off has asked every cell
    the same, but for its last round.

    indexes: of the documents that each cell is asked. round_of: documents of a cell in a round; None: all, a single
    round. num_measured: documents below this index are measured; None: all.
    """

    cells: Sequence[Cell]
    indexes: Sequence[int]
    round_of: int | None = None
    num_measured: int | None = None

    @property
    def rounds(self) -> list[Sequence[int]]:
        """The documents of each round."""
        size = self.round_of or max(1, len(self.indexes))
        return [self.indexes[begin : begin + size] for begin in range(0, len(self.indexes), size)]

    def stages(self, indexes: Sequence[int]) -> Iterator[Stage]:
        """A round's. A measured request slows every step that it takes part in: the others come after."""
        for _, group in groupby(
            self.cells, lambda cell: (cell.task, cell.length, cell.protocol, cell.policy)
        ):
            cells = tuple(group)
            for is_measured in (True, False):
                asked = [index for index in indexes if self.measures(index) == is_measured]
                if asked:
                    yield Stage(is_measured, tuple((cell, index) for index in asked for cell in cells))

    def measures(self, index: int) -> bool:
        """Whether a document is measured."""
        return self.num_measured is None or index < self.num_measured
