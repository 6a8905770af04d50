"""Tables of answer quality: a line for each policy, a column for each protocol and budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks import tables
from benchmarks.pages.sources import results
from benchmarks.tables import Column
from carrel.evaluation.cells import UNBUDGETED, budget_name, length_name
from carrel.evaluation.record import CellResult

Text = Callable[[CellResult], str]
MIB = 2**20


@dataclass(frozen=True)
class Grid:
    """Results looked up by policy, length, protocol and budget."""

    results: Sequence[CellResult]

    def of(self, policy: str, length: int, protocol: str, budget: float | None) -> CellResult | None:
        wanted = None if policy == UNBUDGETED else budget
        for result in self.results:
            cell = result.cell
            same = (cell.policy, cell.length, cell.protocol) == (policy, length, protocol)
            if same and cell.budget == wanted:
                return result
        return None

    def policies(self, length: int) -> list[str]:
        """`full` and `oracle` first, the others by the answers they get right."""
        right: dict[str, float] = {}
        for result in self.results:
            if result.cell.length == length:
                name = result.cell.policy
                right[name] = right.get(name, 0.0) + result.exact_match
        first = (UNBUDGETED, "oracle")
        return sorted(right, key=lambda name: (name not in first, name != UNBUDGETED, -right[name], name))

    def column(
        self, heading: str, length: int, protocol: str, budget: float | None, text: Text
    ) -> Column[str]:
        """One cell's text for each policy; empty where it was not asked."""

        def of(policy: str) -> str:
            result = self.of(policy, length, protocol, budget)
            return "" if result is None else text(result)

        return Column(heading, of)


def main() -> str:
    """One in sixteen facts, 100 questions a cell, under both protocols."""
    # the last two cells of the first run were cut short and asked again on a CPU
    grid = Grid(results("quality_h200", "quality_8k_clusterkv_cpu"))
    lines = [
        (UNBUDGETED, None),
        *((name, budget) for name in ("oracle", "pqcache", "clusterkv") for budget in (0.2, 0.1)),
    ]

    def of(length: int, protocol: str, text: Text) -> Callable[[tuple[str, float | None]], str]:
        def cell(line: tuple[str, float | None]) -> str:
            result = grid.of(line[0], length, protocol, line[1])
            assert result is not None, (line, length, protocol)
            return text(result)

        return cell

    columns: list[Column[tuple[str, float | None]]] = [
        Column("policy", lambda line: f"`{line[0]}`", False),
        Column("attended", lambda line: budget_name(line[1]) or "all"),
    ]
    for length in (4096, 8192):
        for protocol in ("P1", "P2"):
            asked = f"{length_name(length)}, {protocol}"
            columns.append(Column(asked, of(length, protocol, _with_interval)))
    columns += [
        Column("attention mass", of(8192, "P1", lambda result: tables.number(result.attention_mass, 3))),
        Column("recall rate", of(8192, "P1", lambda result: tables.number(result.recall_rate, 2))),
        Column("hit rate", of(8192, "P1", _hit_rate)),
    ]
    return tables.markdown(columns, lines)


def every_method(length: int) -> Callable[[], str]:
    """Exact match of every method at one length."""

    def table() -> str:
        grid = Grid(results("quality_all_h200"))
        cells = [(protocol, budget) for protocol in ("P1", "P2") for budget in (0.2, 0.1, 0.05, 512)]
        columns = [
            grid.column(f"{protocol} {budget_name(budget)}", length, protocol, budget, _exact)
            for protocol, budget in cells
        ]
        return _by_policy(columns, grid.policies(16384))

    return table


def what_it_takes() -> str:
    """Every method at 16K, a tenth kept or attended: what it attended, holds and moves."""
    grid = Grid(results("quality_all_h200"))
    columns = [
        grid.column(heading, 16384, "P1", 0.1, text)
        for heading, text in (
            ("attention mass", lambda result: tables.number(result.attention_mass, 3)),
            ("recall rate", lambda result: tables.number(result.recall_rate, 2)),
            ("hit rate", _hit_rate),
            ("GPU MiB", lambda result: f"{(result.device_bytes or 0) / MIB:.1f}"),
            ("host MiB", lambda result: f"{(result.host_bytes or 0) / MIB:.0f}"),
            ("MiB moved", lambda result: f"{result.bytes_moved / MIB:.1f}"),
        )
    ]
    return _by_policy(columns, grid.policies(16384))


def protokv() -> str:
    """Small budgets, in tokens."""
    grid = Grid(results("quality_protokv_cpu"))
    columns = [grid.column(budget_name(b), 4096, "P1", b, _with_interval) for b in (128, 256, 512)]
    columns.append(
        grid.column(
            "attention mass at 512", 4096, "P1", 512, lambda result: tables.number(result.attention_mass, 3)
        )
    )
    return _by_policy(columns, [name for name in grid.policies(4096) if name != UNBUDGETED])


def outliers() -> str:
    """Chelsea with one head left whole."""
    grid = Grid(results("quality_chelsea_outliers_h200", "quality_chelsea_outliers_cpu"))
    columns = [
        grid.column(f"{protocol} {budget_name(budget)}", 4096, protocol, budget, _exact)
        for protocol in ("P1", "P2")
        for budget in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
    ]
    return _by_policy(columns, [name for name in grid.policies(4096) if name != UNBUDGETED])


def times() -> str:
    """Each request alone, against `full`."""
    grid = Grid(results("quality_times_cpu"))
    full = grid.of(UNBUDGETED, 4096, "P1", None)
    assert full is not None
    columns = [
        grid.column(
            "prefill / full", 4096, "P1", 0.2, lambda r: _share(r.median_prefill_ms, full.median_prefill_ms)
        ),
        grid.column("step / full", 4096, "P1", 0.2, lambda r: _share(r.median_step_ms, full.median_step_ms)),
    ]
    names = [result.cell.policy for result in grid.results if result.cell.policy != UNBUDGETED]
    return _by_policy(columns, sorted(names, key=columns[0].text))


def ablations() -> str:
    """The papers' ablations, each after its method."""
    grid = Grid(results("quality_ablations_cpu"))
    columns = [
        grid.column(f"{heading} {budget_name(budget)}", 4096, "P1", budget, text)
        for heading, text in (
            ("exact match,", _exact),
            ("attention mass,", lambda result: tables.number(result.attention_mass, 3)),
            ("recall rate,", lambda result: tables.number(result.recall_rate, 2)),
        )
        for budget in (0.2, 512)
    ]
    names = dict.fromkeys(result.cell.policy for result in grid.results)
    return _by_policy(columns, [name for name in names if name != UNBUDGETED])


def _by_policy(columns: Iterable[Column[str]], policies: Sequence[str]) -> str:
    first: Column[str] = Column("policy", lambda policy: f"`{policy}`", False)
    return tables.markdown([first, *columns], policies)


def _exact(result: CellResult) -> str:
    return f"{result.exact_match:.2f}"


def _with_interval(result: CellResult) -> str:
    return f"{result.exact_match:.2f} ({result.low:.2f}-{result.high:.2f})"


def _hit_rate(result: CellResult) -> str:
    """Of what was recalled: `-` where everything that may be attended lies on the device."""
    is_recalled = result.bytes_moved > 0
    return f"{result.hit_rate:.2f}" if is_recalled else "-"


def _share(value: float | None, whole: float | None) -> str:
    return f"{value / whole:.2f}" if value is not None and whole else "-"
