"""Decode steps of the 8B shape by policy, for docs/quality.md."""

from __future__ import annotations

from benchmarks import tables
from benchmarks.pages.decode import workloads
from benchmarks.pages.sources import matching
from benchmarks.tables import Column
from carrel.evaluation.cells import UNBUDGETED

# The later before the earlier.
STEPS = "decode_policies*_h200", "decode_h200"
WORKLOADS = ((32768, 24), (131072, 6))

Times = dict[str, dict[tuple[int, int], float]]


def measured() -> Times:
    """Milliseconds of a step with every token on one H200, by policy and then by context and batch."""
    rows: Times = {}
    for name in (name for pattern in STEPS for name in matching(pattern)):
        for at in workloads(name):
            case = at.rows[0].case
            place = (case.context, case.batch)
            if case.gpu_memory_limit is not None or place not in WORKLOADS:
                continue
            for row in at.rows:
                if row.rival == "carrel" and row.figures is not None and row.case.hit_rate is None:
                    rows.setdefault(row.case.policy, {}).setdefault(place, row.figures.ms_per_step)
    return rows


def table() -> str:
    """A step beside dense attention's."""
    rows = measured()
    columns: list[Column[str]] = [Column("policy", lambda policy: f"`{policy}`", False)]
    for place in WORKLOADS:
        heading = f"{tables.tokens(place[0])} x {place[1]}"
        columns.append(
            Column(f"{heading}, ms", lambda policy, place=place: tables.number(rows[policy].get(place), 2))
        )
        columns.append(Column("x `full`", lambda policy, place=place: faster(rows, policy, place)))
    return tables.markdown(columns, sorted(rows, key=lambda policy: (policy != UNBUDGETED, policy)))


def faster(rows: Times, policy: str, place: tuple[int, int]) -> str:
    """How many steps `full` takes in the time of one: "-" where it is not known."""
    ours, full = rows.get(policy, {}).get(place), rows.get(UNBUDGETED, {}).get(place)
    return f"{full / ours:.2f}" if ours and full else "-"
