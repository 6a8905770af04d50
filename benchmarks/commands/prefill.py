"""`carrel bench prefill`: time to the first and to the second token of one long prompt."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.commands.options import (
    add_memory_limit,
    add_model,
    add_output,
    add_policies,
    at_least,
    budget_tokens,
    keeper,
    num_tokens,
)
from benchmarks.comparison import Outcome, choose, measure_rivals
from benchmarks.device import choose_device
from benchmarks.figures import PrefillCase, PrefillFigures, revive
from benchmarks.rivals import BASELINE, PREFILL, RivalSpec
from benchmarks.shapes import SHAPES
from carrel import tables
from carrel.process.command_line import flag
from carrel.progress import RunProgress
from carrel.tables import Column

DEFAULT_CONTEXTS = {
    "llama-3.1-8b": [8192, 32768, 131072],
    "llama-3.1-8b-1m": [1 << 19],
    "llama-3.2-1b-1m": [1 << 20],
    "nano": [1024, 4096],
    "tiny": [64, 128],
}


@dataclass(frozen=True)
class PrefillRow:
    """A rival and a prompt. ttft_ratio: to the baseline of the same run; full_ratio, tt2t_ratio: of the times to the
    first and the second token, to Carrel's dense policy."""

    rival: str
    case: PrefillCase
    figures: PrefillFigures | None
    error: str | None
    ttft_ratio: float | None = None
    tt2t_ratio: float | None = None
    full_ratio: float | None = None


COLUMNS: tuple[Column[PrefillRow], ...] = (
    Column("context", lambda row: tables.tokens(row.case.context)),
    Column("rival", lambda row: row.rival, False),
    Column("policy", lambda row: row.case.policy, False),
    Column("budget", lambda row: str(row.case.budget_tokens or "-")),
    Column("limit, GiB", lambda row: tables.gib(row.case.gpu_memory_limit)),
    Column("first token, ms", lambda row: row.figures.ttft_ms.text(1) if row.figures else "-"),
    Column("x minimal dense", lambda row: tables.number(row.ttft_ratio, 2)),
    Column("x carrel full", lambda row: tables.number(row.full_ratio, 2)),
    Column(
        "second token, ms",
        lambda row: row.figures.tt2t_ms.text(1) if row.figures and row.figures.tt2t_ms else "-",
    ),
    Column("x carrel full", lambda row: tables.number(row.tt2t_ratio, 2)),
    Column("tokens/s", lambda row: tables.number(_rate(row), 0)),
    Column("GPU, GiB", lambda row: tables.gib(row.figures.device_bytes) if row.figures else "-"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    flag(parser, "--contexts", "such as 32K 128K", parse=num_tokens, nargs="+")
    add_policies(parser)
    add_memory_limit(parser)
    flag(parser, "--rivals", f"{', '.join(PREFILL.rivals)}", [BASELINE, "carrel"], metavar="NAME")
    flag(parser, "--repeats", "", 3, at_least(1))
    flag(parser, "--rounds", "", 1, at_least(1))
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Raises BenchmarkError."""
    shape, device = SHAPES[options.model_shape], choose_device(options.device)
    asked = [
        PrefillCase(
            shape.name,
            policy,
            budget_tokens(options, policy, context),
            context,
            options.gpu_memory_limit,
            options.repeats,
        )
        for context in options.contexts or DEFAULT_CONTEXTS[shape.name]
        for policy in options.policies
    ]
    plan = {name: cases_of(PREFILL.rivals[name], asked) for name in choose(PREFILL, options.rivals)}
    total = options.rounds * sum(len(cases) for cases in plan.values())
    keep = keeper(options, str(device), shape, rows_of)
    with RunProgress(total) as progress:
        outcomes = measure_rivals(PREFILL, plan, shape.name, str(device), options.rounds, progress, keep)
    rows = keep(outcomes)
    tables.show("prefill", COLUMNS, rows, notes(rows))
    return 0


def cases_of(spec: RivalSpec, asked: Sequence[PrefillCase]) -> list[PrefillCase]:
    """Return the requested cases, or their dense counterparts, once each."""
    if spec.has_policies:
        return list(dict.fromkeys(asked))
    return list(dict.fromkeys(replace(case, policy="full", budget_tokens=None) for case in asked))


def rows_of(outcomes: Sequence[Outcome[PrefillCase, PrefillFigures]]) -> list[PrefillRow]:
    """With their ratios, ordered by context."""
    rows = []
    for outcome in outcomes:
        row = PrefillRow(outcome.rival, outcome.case, outcome.figures, outcome.error)
        if (figures := outcome.figures) is not None:
            baseline = _dense(BASELINE, outcome.case, outcomes)
            # What the same rival took, and where it was not asked for that, what Carrel did.
            dense = _dense(outcome.rival, outcome.case, outcomes) if _is_carrel(outcome.rival) else None
            dense = dense or _dense("carrel", outcome.case, outcomes)
            if baseline is not None:
                row = replace(row, ttft_ratio=figures.ttft_ms.median / baseline.ttft_ms.median)
            if dense is not None and _is_carrel(outcome.rival):
                row = replace(row, full_ratio=figures.ttft_ms.median / dense.ttft_ms.median)
            if dense is not None and dense.tt2t_ms is not None and figures.tt2t_ms is not None:
                row = replace(row, tt2t_ratio=figures.tt2t_ms.median / dense.tt2t_ms.median)
        rows.append(row)
    return sorted(rows, key=lambda row: row.case.context)


def _dense(
    rival: str, case: PrefillCase, outcomes: Sequence[Outcome[PrefillCase, PrefillFigures]]
) -> PrefillFigures | None:
    wanted = replace(case, policy="full", budget_tokens=None)
    return next((each.figures for each in outcomes if (each.rival, each.case) == (rival, wanted)), None)


def _rate(row: PrefillRow) -> float | None:
    return 1e3 * row.case.context / row.figures.ttft_ms.median if row.figures else None


def notes(rows: Sequence[PrefillRow]) -> Iterable[str]:
    """The cases that could not be measured."""
    for row in rows:
        if row.error:
            yield f"{row.rival}, {row.case}: {row.error.splitlines()[-1]}"


def render(content: dict[str, Any]) -> str:
    rows = [revive(PrefillRow, fields) for fields in content["rows"]]
    return tables.markdown(COLUMNS, rows, notes(rows))


def _is_carrel(rival: str) -> bool:
    return PREFILL.rivals[rival].has_policies
