"""The quality table, on a terminal and as Markdown, and the targets that it is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from carrel.evaluation.cells import UNBUDGETED, budget_name
from carrel.evaluation.record import CellResult
from carrel.tables import Column, interval, markdown, number, tokens

MIB = 2**20


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
            f"{self.task} {tokens(self.length)} {target.protocol} {budget_name(target.budget)}: {target.policy} "
            f"loses {self.loss:+.3f} against {target.against} (target: at most {target.most:.2f}): "
            f"{'met' if self.is_met else 'MISSED'}"
        )


def columns(results: Sequence[CellResult]) -> tuple[Column[CellResult], ...]:
    """The columns of a table of these results; times are held against those of `full` that was asked the same."""
    full = {_asked(result): result for result in results if result.cell.policy == UNBUDGETED}

    def ratio(result: CellResult, time: Callable[[CellResult], float | None]) -> str:
        ours, theirs = time(result), time(full[_asked(result)]) if _asked(result) in full else None
        return f"{ours / theirs:.2f}" if ours is not None and theirs else "-"

    return (
        Column("task", lambda r: r.cell.task, False),
        Column("length", lambda r: tokens(r.cell.length), False),
        Column("protocol", lambda r: r.cell.protocol, False),
        Column("policy", lambda r: r.cell.policy, False),
        Column("budget", lambda r: budget_name(r.cell.budget) or "all", False),
        Column("n", lambda r: str(r.n)),
        Column("exact match", lambda r: interval(r.exact_match, r.low, r.high, 2)),
        Column("score", lambda r: "-" if r.score is None else r.score.text()),
        Column("attention mass", lambda r: number(r.attention_mass, 3)),
        Column("recall rate", lambda r: number(r.recall_rate, 3)),
        Column("of the best", lambda r: number(r.best_recall, 3)),
        Column(
            "attended",
            lambda r: f"{r.attended_tokens:.0f}" + (f" + {r.window_tokens:.0f}" if r.window_tokens else ""),
        ),
        Column("hit rate", lambda r: f"{r.hit_rate:.3f}" if _recalls(r) else "-"),
        Column("GPU MiB", lambda r: _mib(r.device_bytes)),
        Column("host MiB", lambda r: _mib(r.host_bytes)),
        Column("MiB moved", lambda r: f"{r.bytes_moved / MIB:.1f}" if _recalls(r) else "-"),
        Column("prefill / full", lambda r: ratio(r, lambda of: of.median_prefill_ms)),
        Column("step / full", lambda r: ratio(r, lambda of: of.median_step_ms)),
    )


def markdown_table(results: Sequence[CellResult]) -> str:
    """The quality table for a page."""
    return markdown(columns(results), results)


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


def _asked(result: CellResult) -> tuple[str, int, str]:
    """Return the key by which a result is compared with `full`."""
    return result.cell.task, result.cell.length, result.cell.protocol


def _recalls(result: CellResult) -> bool:
    """Return whether it attended rows from the store.

    Older reports also count rows that were stored only to be measured.
    """
    return bool(result.offloaded_tokens if result.host_bytes is None else result.host_bytes)


def _mib(num_bytes: float | None) -> str:
    if not num_bytes:
        return "-" if num_bytes is None else "0"
    mib = num_bytes / MIB
    return f"{mib:.0f}" if mib >= 100 else f"{mib:.1f}" if mib >= 10 else f"{mib:.2f}"
