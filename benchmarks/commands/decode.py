"""`carrel bench decode`: time per output token, throughput, memory and bytes moved, beside the minimal dense loop."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import plots, tables, targets
from benchmarks.commands.options import (
    Workload,
    add_memory_limit,
    add_model,
    add_output,
    add_policies,
    add_workloads,
    at_least,
    budget_tokens,
    keeper,
    share,
    workloads_of,
)
from benchmarks.comparison import Outcome, choose, measure_rivals
from benchmarks.device import choose_device, default_dtype
from benchmarks.figures import DecodeCase, DecodeFigures, revive
from benchmarks.progress import RunProgress
from benchmarks.rivals import BASELINE, DECODE, RivalSpec
from benchmarks.shapes import SHAPES, ModelShape
from benchmarks.tables import Column
from benchmarks.traces import RecordedTrace

# activations, logits and the allocator's rounding
DENSE_SPARE_BYTES = 1 << 30


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
    Column("attended", lambda row: _of(row, lambda f: tables.number(f.attended_tokens, 0))),
    Column("replayed", lambda row: tables.number(row.case.hit_rate, 2)),
    Column("limit, GiB", lambda row: tables.gib(row.case.gpu_memory_limit)),
    Column("ms a step", lambda row: _of(row, lambda f: tables.spread(f.step_ms, 2))),
    Column("mean, ms", lambda row: _of(row, lambda f: tables.number(f.mean_ms, 2))),
    Column("tokens/s", lambda row: tables.number(row.tokens_per_s, 0)),
    Column("x dense", lambda row: tables.number(row.throughput_ratio, 2)),
    Column("x full", lambda row: tables.number(row.full_ratio, 2)),
    Column("hit rate", lambda row: _of(row, lambda f: tables.number(f.hit_rate, 3))),
    Column("MiB moved", lambda row: _of(row, lambda f: f"{f.bytes_moved / 2**20:.1f}")),
    Column("GPU, GiB", lambda row: _of(row, lambda f: tables.gib(f.device_bytes))),
    Column("host, GiB", lambda row: _of(row, lambda f: tables.gib(f.host_bytes))),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_workloads(parser)
    add_policies(parser)
    selections = parser.add_mutually_exclusive_group()
    selections.add_argument(
        "--hit-rates",
        nargs="+",
        type=share,
        default=[None],
        metavar="H",
        help="replay selections of which this share was selected a step before; full has none "
        "(default: what random weights select)",
    )
    selections.add_argument(
        "--trace",
        type=Path,
        default=None,
        metavar="FILE",
        help="replay what `carrel bench hitrate --trace FILE` recorded; --budget must select as many positions",
    )
    add_memory_limit(parser)
    parser.add_argument(
        "--rivals",
        nargs="+",
        default=[BASELINE, "weights only", "carrel"],
        metavar="NAME",
        help=f"{', '.join(DECODE.rivals)} (default: {BASELINE}, weights only, carrel)",
    )
    parser.add_argument(
        "--steps", type=at_least(1), default=50, metavar="N", help="timed (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=1, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--profile",
        type=Path,
        default=None,
        metavar="DIR",
        help="write a trace of one more step of each of carrel's cases, for Perfetto or chrome://tracing",
    )
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Raises BenchmarkError."""
    shape, device = SHAPES[options.model_shape], choose_device(options.device)
    if options.trace:
        # a rival runs in another folder
        options.trace = options.trace.resolve()
        recorded = RecordedTrace.load(options.trace, torch.device("cpu"))
        options.hit_rates = [round(recorded.hit_rate, 4)]
    asked = [
        case
        for workload in workloads_of(options)
        for case in _cases(options, workload, (policy for policy in options.policies))
    ]
    element_bytes = default_dtype(device).itemsize
    plan = {
        name: cases_of(DECODE.rivals[name], asked, shape, element_bytes)
        for name in choose(DECODE, options.rivals)
    }
    total = options.rounds * sum(len(cases) for cases in plan.values())
    keep = keeper(options, str(device), shape, rows_of)
    with RunProgress(total) as progress:
        outcomes = measure_rivals(DECODE, plan, shape.name, str(device), options.rounds, progress, keep)
    rows = keep(outcomes)
    tables.show("decode", COLUMNS, rows, notes(rows))
    if options.plots:
        draw(rows, options.plots)
    return 0


def _cases(options: argparse.Namespace, workload: Workload, policies: Iterable[str]) -> list[DecodeCase]:
    return [
        DecodeCase(
            options.model_shape,
            policy,
            budget_tokens(options, policy, workload.context),
            workload.batch,
            workload.context,
            None if policy == "full" else hit_rate,
            options.gpu_memory_limit,
            options.steps,
            None if policy == "full" or options.trace is None else str(options.trace),
            None if options.profile is None else str(options.profile.resolve()),
        )
        for policy in policies
        for hit_rate in (options.hit_rates if policy != "full" else [None])
    ]


def cases_of(
    spec: RivalSpec, asked: Sequence[DecodeCase], shape: ModelShape, element_bytes: int
) -> list[DecodeCase]:
    """The cases of one rival: what was asked, or its dense counterpart, once each, in a batch that fits the limit."""
    cases = list(asked)
    if not spec.has_policies:
        cases = [
            replace(case, policy="full", budget_tokens=None, hit_rate=None, trace=None) for case in cases
        ]
        cases = [replace(case, batch=_fitting(case, shape, element_bytes)) for case in cases]
    if spec.max_batch is not None:
        cases = [case for case in cases if case.batch <= spec.max_batch]
    if spec.max_repeats is not None:
        cases = [replace(case, steps=min(case.steps, spec.max_repeats)) for case in cases]
    return list(dict.fromkeys(cases))


def _fitting(case: DecodeCase, shape: ModelShape, element_bytes: int) -> int:
    """The largest batch up to the case's whose dense cache fits the limit beside the weights, at least 1."""
    if case.gpu_memory_limit is None:
        return case.batch
    room = case.gpu_memory_limit - shape.num_weights * element_bytes - DENSE_SPARE_BYTES
    return max(1, min(case.batch, room // shape.kv_bytes(case.context, element_bytes)))


def rows_of(outcomes: Sequence[Outcome[DecodeCase, DecodeFigures]]) -> list[DecodeRow]:
    """With throughputs and their ratios, ordered by workload."""
    rows = []
    for outcome in outcomes:
        case = outcome.case
        # the file's folder does not belong into a result
        named = replace(case, trace=case.trace and Path(case.trace).name)
        row = DecodeRow(outcome.rival, named, outcome.figures, outcome.error)
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
    wanted = replace(outcome.case, policy="full", budget_tokens=None, hit_rate=None, trace=None)
    same = (each.figures for each in outcomes if (each.rival, each.case) == ("carrel", wanted))
    return next(same, None) if outcome.rival == "carrel" else None


def _throughput(case: DecodeCase, figures: DecodeFigures) -> float:
    return 1e3 * case.batch / figures.ms_per_step


def notes(rows: Sequence[DecodeRow]) -> Iterable[str]:
    """What could not be measured, and the targets."""
    for row in rows:
        if row.error:
            yield f"{row.rival}, {row.case}: {row.error.splitlines()[-1]}"
    for row in rows:
        if row.rival == "carrel":
            ratios = targets.Speedups(row.throughput_ratio, row.full_ratio, _weights_ratio(row, rows))
            yield from targets.decode_verdicts(row.case, ratios)


def _weights_ratio(row: DecodeRow, rows: Sequence[DecodeRow]) -> float | None:
    """Of the rival that reads the weights only, at the same context, batch and limit."""
    place = _place(row.case)
    same = (each for each in rows if each.rival == "weights only" and _place(each.case) == place)
    return next((each.throughput_ratio for each in same), None)


def _place(case: DecodeCase) -> tuple[int, int, int | None]:
    return case.context, case.batch, case.gpu_memory_limit


def render(content: dict[str, Any]) -> str:
    rows = [revive(DecodeRow, fields) for fields in content["rows"]]
    return tables.markdown(COLUMNS, rows, notes(rows))


def draw(rows: Sequence[DecodeRow], folder: Path) -> None:
    """One PNG for each question that the rows answer: a group of bars for each workload, a bar a rival."""
    done = [(row, row.figures) for row in rows if row.figures is not None]
    workloads = list(dict.fromkeys(_workload(row) for row, _ in done))
    rivals = list(dict.fromkeys(_who(row) for row, _ in done))

    def series(of: Callable[[DecodeRow, DecodeFigures], float | None]) -> dict[str, list[float | None]]:
        values = {(_who(row), _workload(row)): of(row, figures) for row, figures in done}
        found = {rival: [values.get((rival, workload)) for workload in workloads] for rival in rivals}
        return {rival: heights for rival, heights in found.items() if any(heights)}

    for name, label, heights in (
        ("tpot", "ms a step", series(lambda _, f: f.ms_per_step)),
        ("throughput", "tokens/s", series(lambda row, _: row.tokens_per_s)),
        ("speedup", f"x {BASELINE}", series(lambda row, _: row.throughput_ratio)),
        ("memory", "GPU memory, GiB", series(lambda _, f: f.device_bytes / 2**30)),
        ("bytes_moved", "MiB a step", series(lambda _, f: f.bytes_moved / 2**20)),
        ("hit_rate", "hit rate", series(lambda _, f: f.hit_rate)),
    ):
        if heights:
            plots.bars(folder / f"decode_{name}.png", label, workloads, heights)


def _workload(row: DecodeRow) -> str:
    return f"{tables.tokens(row.case.context)} x {row.case.batch}"


def _who(row: DecodeRow) -> str:
    if row.rival != "carrel":
        return row.rival
    replayed = "" if row.case.hit_rate is None else f" h={row.case.hit_rate}"
    return f"carrel {row.case.policy}{replayed}"


def _of(row: DecodeRow, text: Any) -> str:
    return "-" if row.figures is None else str(text(row.figures))
