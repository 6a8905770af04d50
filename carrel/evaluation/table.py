"""The quality table, on a terminal and as Markdown, and the targets that it is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from carrel.evaluation.cells import UNBUDGETED, budget_name, length_name
from carrel.evaluation.record import CellResult
from carrel.evaluation.scoring import Mean

MIB = 2**20


@dataclass(frozen=True)
class Column:
    """A heading, and what stands under it: for a cell's result, beside that of `full` where it was asked the same."""

    heading: str
    text: Callable[[CellResult, CellResult | None], str]
    is_number: bool = True


COLUMNS = (
    Column("task", lambda r, _: r.cell.task, False),
    Column("length", lambda r, _: length_name(r.cell.length), False),
    Column("protocol", lambda r, _: r.cell.protocol, False),
    Column("policy", lambda r, _: r.cell.policy, False),
    Column("budget", lambda r, _: budget_name(r.cell.budget) or "all", False),
    Column("n", lambda r, _: str(r.n)),
    Column("exact match", lambda r, _: f"{r.exact_match:.2f} ({r.low:.2f}-{r.high:.2f})"),
    Column("score", lambda r, _: "-" if r.score is None else mean_text(r.score)),
    Column("attention mass", lambda r, _: _share(r.attention_mass)),
    Column("recall rate", lambda r, _: _share(r.recall_rate)),
    Column("of the best", lambda r, _: _share(r.best_recall)),
    Column(
        "attended",
        lambda r, _: f"{r.attended_tokens:.0f}" + (f" + {r.window_tokens:.0f}" if r.window_tokens else ""),
    ),
    Column("hit rate", lambda r, _: f"{r.hit_rate:.3f}" if _recalls(r) else "-"),
    Column("GPU MiB", lambda r, _: _mib(r.device_bytes)),
    Column("host MiB", lambda r, _: _mib(r.host_bytes)),
    Column("MiB moved", lambda r, _: f"{r.bytes_moved / MIB:.1f}" if _recalls(r) else "-"),
    Column("prefill / full", lambda r, full: _ratio(r, full, lambda of: of.median_prefill_ms)),
    Column("step / full", lambda r, full: _ratio(r, full, lambda of: of.median_step_ms)),
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
    """Comparison of a policy with its target on one task and length; `loss` is negative where the policy did better."""

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
    for row in _rows(results):
        table.add_row(*row)
    return table


def markdown_table(results: Sequence[CellResult]) -> str:
    """The same for a page."""
    lines = [_line(column.heading for column in COLUMNS)]
    lines.append(_line("---:" if column.is_number else "---" for column in COLUMNS))
    return "\n".join([*lines, *map(_line, _rows(results))])


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


def _rows(results: Sequence[CellResult]) -> list[list[str]]:
    full = {_asked(result): result for result in results if result.cell.policy == UNBUDGETED}
    return [[column.text(result, full.get(_asked(result))) for column in COLUMNS] for result in results]


def _asked(result: CellResult) -> tuple[str, int, str]:
    """Return the key by which a result is compared with `full`."""
    return result.cell.task, result.cell.length, result.cell.protocol


def _recalls(result: CellResult) -> bool:
    """Return whether it attended rows from the store.

    Older reports also count rows that were stored only to be measured.
    """
    return bool(result.offloaded_tokens if result.host_bytes is None else result.host_bytes)


def _ratio(result: CellResult, full: CellResult | None, time: Callable[[CellResult], float | None]) -> str:
    ours, theirs = time(result), time(full) if full else None
    return f"{ours / theirs:.2f}" if ours is not None and theirs else "-"


def mean_text(mean: Mean) -> str:
    """Such as "0.98 (0.95-1.00)"."""
    return f"{mean.value:.2f} ({mean.low:.2f}-{mean.high:.2f})"


def _mib(num_bytes: float | None) -> str:
    if not num_bytes:
        return "-" if num_bytes is None else "0"
    mib = num_bytes / MIB
    return f"{mib:.0f}" if mib >= 100 else f"{mib:.1f}" if mib >= 10 else f"{mib:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
