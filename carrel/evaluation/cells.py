"""The cells of the quality table, one for each way to ask the same questions, and the order in which they are asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from carrel.tables import tokens

PROTOCOLS = ("P1", "P2")
# Attends everything, so a budget means nothing to it.
UNBUDGETED = "full"
# Stands for every method of the worker.
ALL = "all"
# Stands for the papers' ablations, each paper's method before its own.
ABLATIONS = "ablations"
# Chooses between two of the methods, and is none itself.
CHOOSER = "auto"
# Between the name of a method and what is wrapped around it.
WRAPPED = "+"


@dataclass(frozen=True, order=True)
class Cell:
    """One row of the table.

    budget: up to 1 a share of the prefilled tokens, above 1 a number of tokens; None for `full`.
    P1 prefills the whole prompt; P2 the context alone, and the question goes through the decode path.
    """

    task: str
    length: int
    protocol: str
    policy: str
    budget: float | None

    @property
    def name(self) -> str:
        """Such as "mixed 4K P2 pqcache n/10"."""
        parts = [self.task, tokens(self.length), self.protocol, self.policy, budget_name(self.budget)]
        return " ".join(part for part in parts if part)


def plan_cells(
    tasks: Sequence[str],
    lengths: Sequence[int],
    protocols: Sequence[str],
    policies: Sequence[str],
    budgets: Sequence[float],
) -> list[Cell]:
    """Every combination once, in the order of the table."""
    return [
        Cell(task, length, protocol, policy, budget)
        for task in dict.fromkeys(tasks)
        for length in dict.fromkeys(lengths)
        for protocol in dict.fromkeys(protocols)
        for policy in dict.fromkeys(policies)
        for budget in ((None,) if policy == UNBUDGETED else dict.fromkeys(budgets))
    ]


def name_policies(
    asked: Sequence[str], known: Sequence[str], ablations: Mapping[str, Sequence[str]]
) -> list[str]:
    """The policies that are asked for, each once.

    `all` stands for every known one without a plus in its name, `full` first; `ablations` for the known ones of
    `ablations` (by the method that they are of), each after its method, and stays as it is where none is known.
    """
    alone = [name for name in known if WRAPPED not in name and name not in (UNBUDGETED, CHOOSER)]
    methods = [UNBUDGETED, *alone] if UNBUDGETED in known else alone
    ablated = [name for method, kinds in ablations.items() for name in (method, *kinds) if name in known]
    words = {ALL: methods, ABLATIONS: ablated or [ABLATIONS]}
    return list(dict.fromkeys(name for policy in asked for name in words.get(policy, [policy])))


def budget_name(budget: float | None) -> str:
    """0.2 is "n/5"; a share that is no whole part of n stays a number, as a number of tokens does."""
    if budget is None:
        return ""
    if is_tokens(budget):
        return str(int(budget))
    parts = round(1 / budget)
    return f"n/{parts}" if abs(budget * parts - 1) < 1e-6 else f"{budget:g} n"


def is_tokens(budget: float) -> bool:
    """Return whether a budget is a number of tokens; else it is a share."""
    return budget > 1


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
        """Return whether a document is measured."""
        return self.num_measured is None or index < self.num_measured
