"""All committed answers of one model, whatever run asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.pages.sources import matching, report
from carrel.evaluation.cells import UNBUDGETED, Cell
from carrel.evaluation.record import Outcome
from carrel.evaluation.scoring import Mean, paired

INFINITE_BUDGET = 2.0
# Reports from when nothing stood in for what `bitkeys` does not select; and options that say the same, or the default.
WITHOUT_REST = (
    "decode_policies_bitkeys_h200",
    "fidelity_nano_20_h200",
    "fidelity_smollm2_10_h200",
    "fidelity_smollm2_20_h200",
    "quality_nano_facts_h200",
    "quality_nano_recall_h200",
    "quality_smollm2_low_h200",
    "quality_smollm2_needles_h200",
    "quality_smollm2_recall_h200",
    "quality_smollm2_ruler_cpu",
)
NO_REST, FITTED_REST = "bitkeys:rest=none", "bitkeys:rest=fitted"
# Keeps documents of different places apart.
MANY_DOCUMENTS = 1_000_000
# Of a cell with fewer no score is shown.
FEWEST_DOCUMENTS = 10


@dataclass(frozen=True, order=True)
class Place:
    """Where a cell stands but for its policy and budget."""

    task: str
    length: int
    protocol: str

    def cell(self, line: Line) -> Cell:
        return Cell(self.task, self.length, self.protocol, line.policy, line.budget)


@dataclass(frozen=True)
class Line:
    """A policy at a budget, None for `full`."""

    policy: str
    budget: float | None

    @property
    def rank(self) -> tuple[int, str, float]:
        """To sort by: `full` and `oracle` first, the others by name, the large budgets before the small."""
        first = {UNBUDGETED: 0, "oracle": 1}
        return first.get(self.policy, 2), self.policy, -(self.budget or INFINITE_BUDGET)


FULL = Line(UNBUDGETED, None)


@dataclass(frozen=True)
class Joined:
    """Outcomes by cell, each document once."""

    cells: dict[Cell, tuple[Outcome, ...]]

    def only(self, keep: Callable[[Cell], bool]) -> Joined:
        return Joined({cell: outcomes for cell, outcomes in self.cells.items() if keep(cell)})

    def told(self) -> Joined:
        """The cells with enough documents for a score."""
        return Joined({cell: found for cell, found in self.cells.items() if len(found) >= FEWEST_DOCUMENTS})

    def places(self) -> list[Place]:
        return sorted({Place(cell.task, cell.length, cell.protocol) for cell in self.cells})

    def lines(self) -> list[Line]:
        """By their rank."""
        return sorted({Line(cell.policy, cell.budget) for cell in self.cells}, key=lambda line: line.rank)

    def score(self, place: Place, line: Line) -> float | None:
        """The mean score; None where nothing was asked."""
        scores = self._scores(place.cell(line))
        return sum(scores.values()) / len(scores) if scores else None

    def against_full(self, line: Line, places: Sequence[Place]) -> Mean | None:
        """The mean difference to `full` on the same documents of these places, all together."""
        return paired(self._at(line, places), self._at(FULL, places))

    def num_documents(self, line: Line) -> str:
        """Of a cell, the fewest and the most."""
        counts = [len(found) for cell, found in self.cells.items() if Line(cell.policy, cell.budget) == line]
        low, high = min(counts, default=0), max(counts, default=0)
        return str(low) if low == high else f"{low}-{high}"

    def mean(self, line: Line, value: Callable[[Outcome], float | None]) -> float | None:
        """Over all documents of a line where it is known."""
        known = [
            found
            for cell, outcomes in self.cells.items()
            if Line(cell.policy, cell.budget) == line
            for outcome in outcomes
            if (found := value(outcome)) is not None
        ]
        return sum(known) / len(known) if known else None

    def _at(self, line: Line, places: Iterable[Place]) -> dict[int, float]:
        return {
            number * MANY_DOCUMENTS + index: score
            for number, place in enumerate(places)
            for index, score in self._scores(place.cell(line)).items()
        }

    def _scores(self, cell: Cell) -> dict[int, float]:
        """By document; in reports from before there was a score, whether the answer is right."""
        return {
            outcome.index: float(outcome.is_correct) if outcome.score is None else outcome.score
            for outcome in self.cells.get(cell, ())
        }


def shown_policy(report_name: str, policy: str, options: str) -> str:
    """The policy of a report with these options, for the reader: `bitkeys` is what it is by default today."""
    if policy == FITTED_REST:
        return "bitkeys"
    is_without = report_name in WITHOUT_REST or NO_REST in options
    return f"{policy}, rest=none" if policy == "bitkeys" and is_without else policy


@cache
def joined(*patterns: str) -> Joined:
    """All reports of these names as one; of a document that several have, the last of the last pattern."""
    return together([name for pattern in patterns for name in matching(pattern)])


def together(names: Sequence[str]) -> Joined:
    """These reports as one; of a document that several have, the last."""
    found: dict[Cell, dict[int, Outcome]] = {}
    for name in names:
        each = report(name)
        for cell in each.cells():
            shown = replace(cell, policy=shown_policy(name, cell.policy, each.source.policy_options or ""))
            found.setdefault(shown, {}).update({one.index: one for one in each.outcomes(cell)})
    return Joined({cell: tuple(outcomes.values()) for cell, outcomes in found.items()})
