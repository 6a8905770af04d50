"""The quality table, on a terminal and as Markdown, and the targets that it is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from carrel.evaluation.cells import budget_name, length_name
from carrel.evaluation.record import CellResult


@dataclass(frozen=True)
class Column:
    """A heading and what stands under it."""

    heading: str
    text: Callable[[CellResult], str]
    is_number: bool = True


COLUMNS = (
    Column("task", lambda r: r.cell.task, False),
    Column("length", lambda r: length_name(r.cell.length), False),
    Column("protocol", lambda r: r.cell.protocol, False),
    Column("policy", lambda r: r.cell.policy, False),
    Column("budget", lambda r: budget_name(r.cell.budget) or "all", False),
    Column("n", lambda r: str(r.n)),
    Column("exact match", lambda r: f"{r.exact_match:.2f} ({r.low:.2f}-{r.high:.2f})"),
    Column("attention mass", lambda r: _share(r.attention_mass)),
    Column("recall rate", lambda r: _share(r.recall_rate)),
    Column(
        "attended",
        lambda r: f"{r.attended_tokens:.0f}" + (f" + {r.window_tokens:.0f}" if r.window_tokens else ""),
    ),
    Column("hit rate", lambda r: f"{r.hit_rate:.3f}" if r.offloaded_tokens else "-"),
    Column("MiB moved", lambda r: f"{r.bytes_moved / 2**20:.1f}" if r.offloaded_tokens else "-"),
)


@dataclass(frozen=True)
class Target:
    """`policy` may lose at most `most` exact matches against `against`, at n/5 under P1."""

    policy: str
    against: str
    most: float
    budget: float = 0.2
    protocol: str = "P1"


TARGETS = (Target("oracle", "full", 0.03), Target("pqcache", "oracle", 0.05))


@dataclass(frozen=True)
class Verdict:
    """How a target fared on one task and length; `loss` is negative where the policy did better."""

    target: Target
    task: str
    length: int
    loss: float

    @property
    def is_met(self) -> bool:
        return self.loss <= self.target.most + 1e-9

    def __str__(self) -> str:
        target = self.target
        return (
            f"{self.task} {length_name(self.length)} {target.protocol} {budget_name(target.budget)}: {target.policy} "
            f"loses {self.loss:+.3f} against {target.against} (target: at most {target.most:.2f}): "
            f"{'met' if self.is_met else 'MISSED'}"
        )


def rich_table(results: Sequence[CellResult]) -> Table:
    """For a terminal."""
    table = Table(title="Exact match of the whole answer (95 % Wilson interval)")
    for column in COLUMNS:
        table.add_column(column.heading, justify="right" if column.is_number else "left")
    for result in results:
        table.add_row(*(column.text(result) for column in COLUMNS))
    return table


def markdown_table(results: Sequence[CellResult]) -> str:
    """The same for a page."""
    lines = [_line(column.heading for column in COLUMNS)]
    lines.append(_line("---:" if column.is_number else "---" for column in COLUMNS))
    lines += [_line(column.text(result) for column in COLUMNS) for result in results]
    return "\n".join(lines)


def verdicts(results: Sequence[CellResult]) -> list[Verdict]:
    """Every target on every task and length for which both its cells were measured."""
    found = []
    for task, length in dict.fromkeys((result.cell.task, result.cell.length) for result in results):
        for target in TARGETS:
            ours = _find(results, task, length, target.protocol, target.policy, target.budget)
            theirs = _find(results, task, length, target.protocol, target.against, target.budget)
            if ours and theirs:
                found.append(Verdict(target, task, length, theirs.exact_match - ours.exact_match))
    return found


def _find(
    results: Sequence[CellResult], task: str, length: int, protocol: str, policy: str, budget: float
) -> CellResult | None:
    for result in results:
        cell = result.cell
        same = (cell.task, cell.length, cell.protocol, cell.policy) == (task, length, protocol, policy)
        if same and (cell.budget is None or abs(cell.budget - budget) < 1e-9):
            return result
    return None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
