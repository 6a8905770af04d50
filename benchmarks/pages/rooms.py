"""The regrouping of the code, before and after: the same cases on two GPUs, in turned order."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import tables
from benchmarks.commands.prefill import PrefillRow
from benchmarks.decode_rows import DecodeRow
from benchmarks.pages.sources import rows
from benchmarks.tables import Column

# (what, context x batch, policy), and its times in ms
Line = tuple[tuple[str, str, str], float]


def before_and_after() -> str:
    """Decode steps and second tokens: ms, the mean of both GPUs."""
    before, after = (_means(when) for when in ("before", "after"))
    columns = (
        Column[tuple[str, str, str]]("measured", lambda case: case[0], False),
        Column("context x requests", lambda case: case[1], False),
        Column("policy", lambda case: f"`{case[2]}`", False),
        Column("before, ms", lambda case: f"{before[case]:,.2f}"),
        Column("after, ms", lambda case: f"{after[case]:,.2f}"),
        Column("after / before", lambda case: f"{after[case] / before[case]:.3f}"),
    )
    return tables.markdown(columns, list(before))


def _means(when: str) -> dict[tuple[str, str, str], float]:
    found: dict[tuple[str, str, str], list[float]] = {}
    for case, ms in (*_steps(when), *_second_tokens(when)):
        found.setdefault(case, []).append(ms)
    return {case: sum(times) / len(times) for case, times in found.items()}


def _steps(when: str) -> Iterator[Line]:
    for row in rows(DecodeRow, *(f"decode_{when}_rooms_{gpu}_h200" for gpu in (0, 1))):
        assert row.figures, row
        at = f"{tables.tokens(row.case.context)} x {row.case.batch}"
        yield ("a decode step", at, row.case.policy), row.figures.ms_per_step


def _second_tokens(when: str) -> Iterator[Line]:
    for row in rows(PrefillRow, *(f"prefill_{when}_rooms_{gpu}_h200" for gpu in (0, 1))):
        assert row.figures, row
        at = f"{tables.tokens(row.case.context)} x 1"
        yield ("the second token", at, row.case.policy), row.figures.tt2t_ms.median
