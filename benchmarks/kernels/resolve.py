"""From selected positions to slots of the hot cache, all found or a tenth of them missed at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.commands.options import Workload
from benchmarks.kernels.base import KernelCase, Operands, Setting, mismatch
from benchmarks.traces import WindowTrace
from gpu_worker.kernels.resolve.reference import Residency, SeatLanes

HIT_RATES = (1.0, 0.9)
# slots for each selected position
CACHE_FACTOR = 4
# in, its slot out, whether it was missed, and what is looked up
BYTES_A_POSITION = 8 + 8 + 1 + 4


def cases(setting: Setting) -> Iterator[KernelCase]:
    resolve, reference = setting.both("kernels.resolve", "resolve")
    for workload in setting.workloads:
        selected = min(setting.budget_tokens, workload.context // (2 * CACHE_FACTOR))
        for hit_rate in HIT_RATES:
            rows = workload.batch * setting.shape.num_kv_heads
            yield KernelCase(
                "resolve",
                f"{rows} x {selected}, {hit_rate:.0%} found",
                rows * selected * BYTES_A_POSITION,
                _maker(setting, workload, selected, hit_rate, resolve, reference),
            )


def _maker(
    setting: Setting,
    workload: Workload,
    selected: int,
    hit_rate: float,
    resolve: Callable[..., Any],
    reference: Callable[..., Any],
) -> Callable[[], Operands]:
    """Calls share one cache and go round a trace, so that each finds what the one before it left."""
    shape, device = setting.shape, setting.device
    num_slots = CACHE_FACTOR * selected
    num_steps = 1 if hit_rate == 1 else -(-(num_slots + 2 * selected) // round(selected * (1 - hit_rate)))

    @cache
    def shared() -> tuple[Residency, SeatLanes, list[Tensor]]:
        size = (workload.batch, shape.num_kv_heads)
        trace = WindowTrace(
            *size, range(workload.context), selected, hit_rate, device,
            working_set=min(workload.context, num_slots + 2 * selected),
        )  # fmt: skip
        steps = []
        for step in range(num_steps):
            out = torch.empty(1, *size, selected, dtype=torch.int64, device=device)
            trace.select(step, out)
            steps.append(out[0])
        seats = torch.arange(workload.batch, device=device)
        capacities = torch.full_like(seats, num_slots)
        state = empty_state(workload, shape.num_kv_heads, num_slots, device)
        rows = SeatLanes(seats, capacities, torch.zeros_like(seats), torch.full_like(seats, workload.context))
        for required in steps:
            resolve(state, rows, required)
        return state, rows, steps

    def make() -> Operands:
        state, rows, steps = shared()

        def call() -> object:
            steps.append(steps.pop(0))
            return resolve(state, rows, steps[-1])

        def error() -> float:
            found, _ = resolve(_copy(state), rows, steps[0])
            wanted, _ = reference(_copy(state), rows, steps[0])
            return mismatch(found, wanted)

        return Operands(call, error=error)

    return make


def empty_state(workload: Workload, num_heads: int, num_slots: int, device: torch.device) -> Residency:
    def integers(*size: int, fill: int = 0) -> Tensor:
        return torch.full((workload.batch, num_heads, *size), fill, dtype=torch.int32, device=device)

    referenced = torch.zeros(workload.batch, num_heads, num_slots, dtype=torch.uint8, device=device)
    return Residency(
        integers(workload.context, fill=-1), integers(num_slots), referenced, integers(), integers()
    )


def _copy(state: Residency) -> Residency:
    return replace(
        state,
        slot_of=state.slot_of.clone(),
        token_of=state.token_of.clone(),
        referenced=state.referenced.clone(),
        hand=state.hand.clone(),
        filled=state.filled.clone(),
    )
