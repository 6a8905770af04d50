"""docs/quality.md: every policy and budget on one model, answers beside what they cost, and how near predictions are.

Files are found by their names, `quality_MODEL_*.json` of `carrel eval` and `fidelity_MODEL_*.json` of `carrel eval
--fidelity`, so that a new one needs no change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks import tables
from benchmarks.pages.decode import workloads
from benchmarks.pages.sources import fidelity, matching, report
from benchmarks.tables import Column
from carrel.evaluation.cells import UNBUDGETED, Cell, budget_name, length_name
from carrel.evaluation.fidelity.report import Row
from carrel.evaluation.record import CellResult, Report
from carrel.evaluation.scoring import Mean, paired

MIB = 2**20
NOTHING = "*No result of this kind is committed yet.*"
# Of decode steps of the 8B shape, the later before the earlier.
STEPS = "decode_policies*_h200", "decode_h200"
WORKLOADS = ((32768, 24), (131072, 6))
INFINITE_BUDGET = 2.0


@dataclass(frozen=True)
class Line:
    """A policy at a budget, None for `full`."""

    policy: str
    budget: float | None


def answers(model: str, tasks: Sequence[str], lengths: Sequence[int] = ()) -> Callable[[], str]:
    """Answers by policy and budget, a column for each task, length and protocol; lengths: these only."""

    def table() -> str:
        found = _joined(f"quality_{model}_*")
        if found is None:
            return NOTHING
        results = [
            each
            for each in found.results()
            if each.cell.task in tasks and (not lengths or each.cell.length in lengths)
        ]
        by_cell = {each.cell: each for each in results}
        places = sorted(
            {(each.cell.task, each.cell.length, each.cell.protocol) for each in results},
            key=lambda place: (tasks.index(place[0]), *place[1:]),
        )
        columns = [*_line_columns(), *(_answer_column(by_cell, *place, len(tasks) > 1) for place in places)]
        columns += [
            Column("less than `full`", lambda line: _difference(found, line, places)),
            Column("of the best", lambda line: _mean_of(results, line, lambda each: each.best_recall, 2)),
            Column("GPU MiB", lambda line: _mean_of(results, line, _device_mib, 1)),
            Column("host MiB", lambda line: _mean_of(results, line, _host_mib, 0)),
        ]
        return tables.markdown(columns, _lines(each.cell for each in results))

    return table


def predictions(model: str) -> Callable[[], str]:
    """Perplexity, and the distance to dense attention, by length, policy and budget."""

    def table() -> str:
        rows = [row for name in matching(f"fidelity_{model}_*") for row in fidelity(name).rows()]
        if not rows:
            return NOTHING
        columns: tuple[Column[Row], ...] = (
            Column("length", lambda row: length_name(row.length)),
            Column("policy", lambda row: f"`{row.policy}`", False),
            Column("budget", lambda row: budget_name(row.budget) or "all"),
            Column("passages", lambda row: str(row.n)),
            Column("perplexity", lambda row: f"{row.perplexity:.3f}"),
            Column("more than `full`", _percent),
            Column("KL", lambda row: f"{row.kl.value:.4f}"),
            Column("same best token", lambda row: f"{row.agreement.value:.3f}"),
            Column(
                "same tokens generated",
                lambda row: "-" if row.same_tokens is None else f"{row.same_tokens.value:.1f}",
            ),
        )
        return tables.markdown(columns, rows)

    return table


def step_times() -> str:
    """Of the 8B shape with every token on one H200, by policy: a step beside dense attention's."""
    rows: dict[str, dict[tuple[int, int], float]] = {}
    for name in (name for pattern in STEPS for name in matching(pattern)):
        for at in workloads(name):
            case = at.rows[0].case
            place = (case.context, case.batch)
            if case.gpu_memory_limit is not None or place not in WORKLOADS:
                continue
            for row in at.rows:
                if row.rival == "carrel" and row.figures is not None and row.case.hit_rate is None:
                    rows.setdefault(row.case.policy, {}).setdefault(place, row.figures.ms_per_step)
    if not rows:
        return NOTHING
    columns: list[Column[str]] = [Column("policy", lambda policy: f"`{policy}`", False)]
    for place in WORKLOADS:
        heading = f"{tables.tokens(place[0])} x {place[1]}"
        columns.append(
            Column(f"{heading}, ms", lambda policy, place=place: tables.number(rows[policy].get(place), 2))
        )
        columns.append(Column("x `full`", lambda policy, place=place: _faster(rows, policy, place)))
    return tables.markdown(columns, sorted(rows, key=lambda policy: (policy != UNBUDGETED, policy)))


def _joined(pattern: str) -> Report | None:
    """All reports of these names as one, whatever ran them: the cells of each are its own."""
    reports = [report(name) for name in matching(pattern)]
    if not reports:
        return None
    joined = Report(reports[0].source, {})
    for each in reports:
        for result in each.results():
            for outcome in each.outcomes(result.cell):
                joined.add(result.cell, outcome)
    return joined


def _lines(cells: Iterable[Cell]) -> list[Line]:
    """`full` and `oracle` first, the others by name, the large budgets before the small."""
    lines = {Line(cell.policy, cell.budget) for cell in cells}
    first = {UNBUDGETED: 0, "oracle": 1}
    return sorted(
        lines, key=lambda line: (first.get(line.policy, 2), line.policy, -(line.budget or INFINITE_BUDGET))
    )


def _line_columns() -> list[Column[Line]]:
    return [
        Column("policy", lambda line: f"`{line.policy}`", False),
        Column("budget", lambda line: budget_name(line.budget) or "all"),
    ]


def _answer_column(
    results: dict[Cell, CellResult], task: str, length: int, protocol: str, names_task: bool
) -> Column[Line]:
    def text(line: Line) -> str:
        result = results.get(Cell(task, length, protocol, line.policy, line.budget))
        return "" if result is None else f"{_value(result):.2f}"

    place = f"{length_name(length)} {protocol}"
    return Column(f"`{task}` {place}" if names_task else place, text)


def _value(result: CellResult) -> float:
    """The score; in reports from before there was one, the share of exact matches."""
    return result.exact_match if result.score is None else result.score.value


def _difference(found: Report, line: Line, places: Sequence[tuple[str, int, str]]) -> str:
    """Of all documents of these columns, against `full` on the same ones."""
    if line.policy == UNBUDGETED:
        return "-"
    ours: dict[int, float] = {}
    theirs: dict[int, float] = {}
    for number, (task, length, protocol) in enumerate(places):
        for values, policy, budget in ((ours, line.policy, line.budget), (theirs, UNBUDGETED, None)):
            for outcome in found.outcomes(Cell(task, length, protocol, policy, budget)):
                value = float(outcome.is_correct) if outcome.score is None else outcome.score
                values[number * 1_000_000 + outcome.index] = value
    mean = paired(ours, theirs)
    return "" if mean is None else _signed(mean)


def _signed(mean: Mean) -> str:
    return f"{mean.value:+.3f} ({mean.low:+.3f} to {mean.high:+.3f})"


def _mean_of(
    results: Sequence[CellResult], line: Line, value: Callable[[CellResult], float | None], digits: int
) -> str:
    """Over the columns where it was measured."""
    cells = [each for each in results if (each.cell.policy, each.cell.budget) == (line.policy, line.budget)]
    known = [found for each in cells if (found := value(each)) is not None]
    return f"{sum(known) / len(known):.{digits}f}" if known else "-"


def _device_mib(result: CellResult) -> float | None:
    return None if result.device_bytes is None else result.device_bytes / MIB


def _host_mib(result: CellResult) -> float | None:
    return None if result.host_bytes is None else result.host_bytes / MIB


def _percent(row: Row) -> str:
    if row.ratio is None or row.policy == UNBUDGETED:
        return "-"
    low, value, high = (100 * (part - 1) for part in (row.ratio.low, row.ratio.value, row.ratio.high))
    return f"{value:+.2f} % ({low:+.2f} to {high:+.2f})"


def _faster(rows: dict[str, dict[tuple[int, int], float]], policy: str, place: tuple[int, int]) -> str:
    ours, full = rows[policy].get(place), rows.get(UNBUDGETED, {}).get(place)
    return f"{full / ours:.2f}" if ours and full else "-"
