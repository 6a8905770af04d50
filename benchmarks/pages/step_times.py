"""Decode steps of the 8B shape by policy, for docs/quality.md."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import tables
from benchmarks.pages.decode import workloads
from benchmarks.pages.joined import shown_policy
from benchmarks.pages.sources import matching
from benchmarks.tables import Column
from carrel.evaluation.cells import UNBUDGETED

# The later before the earlier.
STEPS = "decode_policies*_h200", "decode_h200"
WORKLOADS = ((32768, 24), (131072, 6))


@dataclass(frozen=True)
class Step:
    """Milliseconds, and of a step of `full` in the same run."""

    ms: float
    of_full: float | None


Times = dict[str, dict[tuple[int, int], Step]]


def measured() -> Times:
    """Steps with every token on one H200, by policy and then by context and batch."""
    found: Times = {}
    for name in (name for pattern in STEPS for name in matching(pattern)):
        for at in workloads(name):
            case = at.rows[0].case
            place = (case.context, case.batch)
            if case.gpu_memory_limit is not None or place not in WORKLOADS:
                continue
            full = at.of("carrel", UNBUDGETED)
            of_full = full.figures.ms_per_step if full and full.figures else None
            for row in at.rows:
                if row.rival == "carrel" and row.figures is not None and row.case.hit_rate is None:
                    policy = shown_policy(name, row.case.policy, "")
                    found.setdefault(policy, {}).setdefault(place, Step(row.figures.ms_per_step, of_full))
    return found


def table() -> str:
    """A step beside dense attention's."""
    steps = measured()
    columns: list[Column[str]] = [Column("policy", lambda policy: f"`{policy}`", False)]
    for place in WORKLOADS:
        heading = f"{tables.tokens(place[0])} x {place[1]}"
        columns.append(Column(f"{heading}, ms", lambda policy, place=place: _ms(steps, policy, place)))
        columns.append(Column("x `full`", lambda policy, place=place: faster(steps, policy, place)))
    return tables.markdown(columns, sorted(steps, key=lambda policy: (policy != UNBUDGETED, policy)))


def faster(steps: Times, policy: str, place: tuple[int, int]) -> str:
    """How many steps `full` takes in the time of one: "-" where it is not known."""
    step = steps.get(policy, {}).get(place)
    return f"{step.of_full / step.ms:.2f}" if step and step.of_full else "-"


def _ms(steps: Times, policy: str, place: tuple[int, int]) -> str:
    step = steps[policy].get(place)
    return tables.number(step.ms if step else None, 2)
