"""docs/quality.md: every policy and budget on one model, answers beside what they cost, and how near predictions are.

Files are found by their names, so that a new one needs no change here: `quality_MODEL_*.json` and `bytes_MODEL*.json`
of `carrel eval`, `fidelity_MODEL_*.json` of `carrel eval --fidelity`, `argmax_*.json` of `benchmarks.argmax`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks import tables
from benchmarks.pages.joined import (
    FITTED_REST,
    FULL,
    NO_REST,
    Joined,
    Line,
    Place,
    joined,
    shown_policy,
)
from benchmarks.pages.sources import content, fidelity, matching
from benchmarks.tables import Column
from carrel.evaluation.cells import UNBUDGETED, Cell, budget_name, length_name
from carrel.evaluation.fidelity.report import WORKER_OPTIONS, Row
from carrel.evaluation.scoring import Mean

MIB = 2**20
NOTHING = "*No result of this kind is committed yet.*"


# Asked at every length; the other methods at one.
CORE = ("full", "oracle", "bitkeys", "pqcache", "clusterkv", "quest", "snapkv", "streaming_llm")


def answers(
    model: str,
    tasks: Sequence[str],
    lengths: Sequence[int] = (),
    budgets: Sequence[float] = (),
    *,
    of_core: bool = True,
    also: str = "",
) -> Callable[[], str]:
    """Answers by policy and budget, a column for each task, length and protocol; lengths, budgets: these only. of_core:
    of the policies of most interest, or else of the others, beside `full`. also: a report of another name."""

    def is_wanted(cell: Cell) -> bool:
        is_core = cell.policy.partition(",")[0] in CORE
        return (
            cell.task in tasks
            and (not lengths or cell.length in lengths)
            and (not budgets or cell.budget is None or cell.budget in budgets)
            and (is_core == of_core or cell.policy == UNBUDGETED)
        )

    def table() -> str:
        asked = joined(also, f"quality_{model}_*").only(is_wanted)
        found = asked.told()
        if not [line for line in found.lines() if line != FULL]:
            return NOTHING
        places = sorted(found.places(), key=lambda at: (tasks.index(at.task), at.length, at.protocol))
        held = joined(f"bytes_{model}*")
        columns = [
            *line_columns(),
            *(score_column(found, place, len(tasks) > 1) for place in places),
            Column("against `full`", lambda line: difference(found, line, places)),
            Column("documents", found.num_documents),
        ]
        if any(outcome.best_recall is not None for outcomes in asked.cells.values() for outcome in outcomes):
            columns.append(
                Column(
                    "of the best",
                    lambda line: tables.number(asked.mean(line, lambda one: one.best_recall), 2),
                )
            )
        if held.cells and of_core:
            columns += [
                Column("GPU MiB", lambda line: _mib(held, line, "device_bytes", 1)),
                Column("host MiB", lambda line: _mib(held, line, "host_bytes", 0)),
                Column("MiB moved", lambda line: _mib(held, line, "bytes_moved", 1)),
            ]
        return tables.markdown(columns, found.lines())

    return table


# README's lines.
BRIEF = (
    *(FULL, Line("bitkeys", 0.05), Line("bitkeys", 0.0125)),
    *(Line("pqcache", 0.1), Line("pqcache", 0.05), Line("clusterkv", 0.1), Line("snapkv", 0.1)),
)


def needles_in_brief() -> str:
    """README's: the real model's needles under the policies of most interest."""
    found = joined("quality_smollm2_*").told()
    found = found.only(lambda cell: cell.task == "niah_single_2" and Line(cell.policy, cell.budget) in BRIEF)
    if not found.cells:
        return NOTHING
    places = found.places()
    columns = [*line_columns(), *(score_column(found, place, False) for place in places)]
    columns.append(Column("against `full`", lambda line: difference(found, line, places)))
    return tables.markdown(columns, found.lines())


def predictions(model: str) -> Callable[[], str]:
    """Perplexity, and the distance to dense attention, by length, policy, budget and what the worker was told."""

    def table() -> str:
        found = _rows(model)
        if not found:
            return NOTHING
        names = {id(row): f"`{shown}`{told}" for row, shown, told in found}
        columns: tuple[Column[Row], ...] = (
            Column("length", lambda row: length_name(row.length)),
            Column("policy", lambda row: names[id(row)], False),
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
            Column("of the best", lambda row: tables.number(row.best_recall, 2)),
            Column("output error", lambda row: tables.number(row.output_error, 3)),
        )
        return tables.markdown(columns, [row for row, *_ in found])

    return table


def _rows(model: str) -> list[tuple[Row, str, str]]:
    """With the policy as it is shown, and what the worker was told beyond its defaults; of several that are the same in
    that, in length, policy and budget the one of most passages. By length, then by rank."""
    best: dict[tuple[int, Line, str], Row] = {}
    for name in matching(f"fidelity_{model}_*"):
        each = fidelity(name)
        given = "; ".join(str(each.about[option]) for option in WORKER_OPTIONS if option in each.about)
        others = given if given not in (NO_REST, FITTED_REST) else ""
        for row in each.rows():
            told = f", {others}" if others and row.policy != UNBUDGETED else ""
            shown = shown_policy(name, row.policy, given)
            key = row.length, Line(shown, row.budget), told
            if key not in best or best[key].n < row.n:
                best[key] = row
    ordered = sorted(best.items(), key=lambda item: (item[0][0], item[0][1].rank, item[0][2]))
    return [(row, line.policy, told) for (_, line, told), row in ordered]


def argmax() -> str:
    """How often bfloat16 chooses what float32 does."""
    rows = [row for name in matching("argmax_*") for row in content(name)["argmax"]]
    if not rows:
        return NOTHING
    columns: tuple[Column[dict[str, object]], ...] = (
        Column("who", lambda row: str(row["who"]), False),
        Column("where", lambda row: str(row["how"]), False),
        Column("tokens", lambda row: f"{row['compared']:,}"),
        Column("same as float32", lambda row: f"{row['same']:.4f} ({row['low']:.4f}-{row['high']:.4f})"),
        Column("near ties", lambda row: f"{row['near_ties']:.3f}"),
    )
    return tables.markdown(columns, rows)


def line_columns() -> list[Column[Line]]:
    return [
        Column("policy", lambda line: f"`{line.policy}`", False),
        Column("budget", lambda line: budget_name(line.budget) or "all"),
    ]


def score_column(found: Joined, place: Place, names_task: bool) -> Column[Line]:
    heading = f"{length_name(place.length)} {place.protocol}"

    def text(line: Line) -> str:
        score = found.score(place, line)
        return "" if score is None else f"{score:.2f}"

    return Column(f"`{place.task}` {heading}" if names_task else heading, text)


def difference(found: Joined, line: Line, places: Sequence[Place]) -> str:
    """Of all documents of these places, against `full` on the same ones."""
    mean = None if line == FULL else found.against_full(line, places)
    return "-" if mean is None else _signed(mean)


def _signed(mean: Mean) -> str:
    return f"{mean.value:+.3f} ({mean.low:+.3f} to {mean.high:+.3f})"


def _mib(held: Joined, line: Line, field: str, digits: int) -> str:
    mean = held.mean(line, lambda outcome: getattr(outcome, field))
    return "-" if mean is None else f"{mean / MIB:.{digits}f}"


def _percent(row: Row) -> str:
    if row.ratio is None or row.policy == UNBUDGETED:
        return "-"
    low, value, high = (100 * (part - 1) for part in (row.ratio.low, row.ratio.value, row.ratio.high))
    return f"{value:+.2f} % ({low:+.2f} to {high:+.2f})"
