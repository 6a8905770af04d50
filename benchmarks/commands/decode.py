"""`carrel bench decode`: time per output token, throughput, memory and bytes moved, beside the minimal dense loop."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

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
from benchmarks.comparison import choose, measure_rivals
from benchmarks.decode_rows import COLUMNS, DecodeRow, notes, rows_of
from benchmarks.device import choose_device, default_dtype
from benchmarks.figures import DecodeCase, revive
from benchmarks.rivals import BASELINE, DECODE, RivalSpec
from benchmarks.shapes import SHAPES, ModelShape
from carrel import tables
from carrel.process.command_line import flag
from carrel.progress import RunProgress
from gpu_worker.models.loader import QUANTIZATIONS
from gpu_worker.row_format import row_format

# activations, logits and the allocator's rounding
DENSE_SPARE_BYTES = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_workloads(parser)
    add_policies(parser)
    flag(
        parser,
        "--hit-rates",
        "replay selections of which this share was selected a step before; full has none "
        "(default: what random weights select)",
        [None],
        share,
        metavar="H",
    )
    flag(
        parser,
        "--quantization",
        f"carrel's weights: {', '.join(QUANTIZATIONS)} or none (default: none)",
        [None],
        quantization,
        metavar="NAME",
    )
    add_memory_limit(parser)
    flag(
        parser,
        "--rivals",
        f"{', '.join(DECODE.rivals)}",
        [BASELINE, "weights only", "carrel"],
        metavar="NAME",
    )
    flag(parser, "--steps", "timed", 50, at_least(1))
    flag(parser, "--rounds", "", 1, at_least(1))
    flag(
        parser,
        "--profile",
        "write a trace of one more step of each of carrel's cases, for Perfetto or chrome://tracing",
        parse=Path,
        metavar="DIR",
    )
    add_output(parser)


def quantization(text: str) -> str | None:
    """Raises ValueError for a name that is none of QUANTIZATIONS."""
    if text not in (*QUANTIZATIONS, "none"):
        raise ValueError(f"must be one of {', '.join(QUANTIZATIONS)}, none")
    return None if text == "none" else text


def run(options: argparse.Namespace) -> int:
    """Raises BenchmarkError."""
    shape, device = SHAPES[options.model_shape], choose_device(options.device)
    asked = [
        case for workload in workloads_of(options) for case in _cases(options, workload, options.policies)
    ]
    dtype = default_dtype(device)
    plan = {
        name: cases_of(DECODE.rivals[name], asked, shape, dtype) for name in choose(DECODE, options.rivals)
    }
    total = options.rounds * sum(len(cases) for cases in plan.values())
    keep = keeper(options, str(device), shape, rows_of)
    with RunProgress(total) as progress:
        outcomes = measure_rivals(DECODE, plan, shape.name, str(device), options.rounds, progress, keep)
    rows = keep(outcomes)
    tables.show("decode", COLUMNS, rows, notes(rows))
    return 0


def _cases(options: argparse.Namespace, workload: Workload, policies: Sequence[str]) -> list[DecodeCase]:
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
            None if options.profile is None else str(options.profile.resolve()),
            weights,
        )
        for weights in options.quantization
        for policy in policies
        for hit_rate in (options.hit_rates if policy != "full" else [None])
    ]


def cases_of(
    spec: RivalSpec, asked: Sequence[DecodeCase], shape: ModelShape, dtype: torch.dtype
) -> list[DecodeCase]:
    """The cases of one rival: what was asked, or its dense counterpart, once each, in a batch that fits the limit."""
    cases = list(asked)
    if not spec.has_policies:
        cases = [replace(case, policy="full", budget_tokens=None, hit_rate=None) for case in cases]
        cases = [replace(case, quantization=None) for case in cases]
        cases = [replace(case, batch=_fitting(case, shape, dtype)) for case in cases]
    if spec.max_batch is not None:
        cases = [case for case in cases if case.batch <= spec.max_batch]
    if spec.max_repeats is not None:
        cases = [replace(case, steps=min(case.steps, spec.max_repeats)) for case in cases]
    return list(dict.fromkeys(cases))


def _fitting(case: DecodeCase, shape: ModelShape, dtype: torch.dtype) -> int:
    """The largest batch up to the case's whose dense cache fits the limit beside the weights, at least 1."""
    if case.gpu_memory_limit is None:
        return case.batch
    room = case.gpu_memory_limit - shape.num_weights * dtype.itemsize - DENSE_SPARE_BYTES
    row_bytes = row_format(shape.head_dim, dtype).row_bytes
    return max(1, min(case.batch, room // shape.kv_bytes(case.context, row_bytes)))


def render(content: dict[str, Any]) -> str:
    rows = [revive(DecodeRow, fields) for fields in content["rows"]]
    return tables.markdown(COLUMNS, rows, notes(rows))
