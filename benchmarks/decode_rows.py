"""Decode times of several rivals, side by side: throughputs and their ratios, a table, charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.comparison import Outcome
from benchmarks.figures import DecodeCase, DecodeFigures
from benchmarks.rivals import BASELINE
from carrel import tables
from carrel.tables import Column


@dataclass(frozen=True)
class DecodeRow:
    """A rival and a case. throughput_ratio: to the dense baseline of the same run, context, batch and limit.
    full_ratio: likewise to Carrel's dense attention, for Carrel's rows.

    Under a limit the baseline's batch is the largest that fits it, and may be smaller.
    """

    rival: str
    case: DecodeCase
    figures: DecodeFigures | None
    error: str | None
    tokens_per_s: float | None = None
    throughput_ratio: float | None = None
    baseline_batch: int | None = None
    full_ratio: float | None = None


COLUMNS: tuple[Column[DecodeRow], ...] = (
    Column("context", lambda row: tables.tokens(row.case.context)),
    Column("batch", lambda row: str(row.case.batch)),
    Column("rival", lambda row: row.rival, False),
    Column("policy", lambda row: row.case.policy, False),
    Column("weights", lambda row: row.case.quantization or "-", False),
    Column("attended", lambda row: _of(row, lambda f: tables.number(f.attended_tokens, 0))),
    Column("replayed", lambda row: tables.number(row.case.hit_rate, 2)),
    Column("limit, GiB", lambda row: tables.gib(row.case.gpu_memory_limit)),
    Column("ms a step", lambda row: _of(row, lambda f: f.step_ms.text(2))),
    Column("mean, ms", lambda row: _of(row, lambda f: tables.number(f.mean_ms, 2))),
    Column("tokens/s", lambda row: tables.number(row.tokens_per_s, 0)),
    Column("x dense", lambda row: tables.number(row.throughput_ratio, 2)),
    Column("x full", lambda row: tables.number(row.full_ratio, 2)),
    Column("hit rate", lambda row: _of(row, lambda f: tables.number(f.hit_rate, 3))),
    Column("MiB moved", lambda row: _of(row, lambda f: f"{f.bytes_moved / 2**20:.1f}")),
    Column("GPU, GiB", lambda row: _of(row, lambda f: tables.gib(f.device_bytes))),
    Column("host, GiB", lambda row: _of(row, lambda f: tables.gib(f.host_bytes))),
)


def rows_of(outcomes: Sequence[Outcome[DecodeCase, DecodeFigures]]) -> list[DecodeRow]:
    """With throughputs and their ratios, ordered by workload."""
    rows = []
    for outcome in outcomes:
        case = outcome.case
        row = DecodeRow(outcome.rival, case, outcome.figures, outcome.error)
        if outcome.figures is not None:
            throughput = _throughput(outcome.case, outcome.figures)
            row = replace(row, tokens_per_s=throughput)
            baseline = _baseline(outcome.case, outcomes)
            if baseline is not None and baseline.figures is not None:
                ratio = throughput / _throughput(baseline.case, baseline.figures)
                row = replace(row, throughput_ratio=ratio, baseline_batch=baseline.case.batch)
            dense = _carrel_dense(outcome, outcomes)
            if dense is not None:
                row = replace(row, full_ratio=throughput / _throughput(case, dense))
        rows.append(row)
    return sorted(rows, key=lambda row: (row.case.context, row.case.batch))


def _baseline(
    case: DecodeCase, outcomes: Sequence[Outcome[DecodeCase, DecodeFigures]]
) -> Outcome[DecodeCase, DecodeFigures] | None:
    """The baseline at this context and limit, with the largest batch up to the case's."""
    same = [
        outcome
        for outcome in outcomes
        if outcome.rival == BASELINE
        and outcome.figures is not None
        and (outcome.case.context, outcome.case.gpu_memory_limit) == (case.context, case.gpu_memory_limit)
        and (outcome.case.batch == case.batch or (case.gpu_memory_limit and outcome.case.batch < case.batch))
    ]
    return max(same, key=lambda outcome: outcome.case.batch, default=None)


def _carrel_dense(
    outcome: Outcome[DecodeCase, DecodeFigures], outcomes: Sequence[Outcome[DecodeCase, DecodeFigures]]
) -> DecodeFigures | None:
    """Carrel's dense attention at the same context, batch and limit, for Carrel's own outcomes."""
    wanted = replace(outcome.case, policy="full", budget_tokens=None, hit_rate=None)
    same = (each.figures for each in outcomes if (each.rival, each.case) == ("carrel", wanted))
    return next(same, None) if outcome.rival == "carrel" else None


def _throughput(case: DecodeCase, figures: DecodeFigures) -> float:
    return 1e3 * case.batch / figures.ms_per_step


def notes(rows: Sequence[DecodeRow]) -> Iterable[str]:
    """The cases that could not be measured."""
    for row in rows:
        if row.error:
            yield f"{row.rival}, {row.case}: {row.error.splitlines()[-1]}"


def _of(row: DecodeRow, text: Any) -> str:
    return "-" if row.figures is None else str(text(row.figures))
