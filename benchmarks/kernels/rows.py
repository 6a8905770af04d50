"""Kernels that find, fetch and store rows, and `top_k`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.commands.options import Workload
from benchmarks.kernels.base import Setting, batches, mismatch, missed, workloads
from benchmarks.kernels.operation import Operation, Rival, Sized
from benchmarks.traces import WindowTrace
from gpu_worker.device import bytes_at
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.resolve.reference import Residency, SeatLanes
from gpu_worker.kernels.resolve.reference import resolve as fill_reference
from gpu_worker.kernels.rows.reference import ArenaLayout
from kv_store.client.layout import Layout, SlabGeometry


def pinned_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Pinned memory as the device sees it: uint8 [num_bytes]; on a CPU, plain memory. No two rows are the same."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    # of an odd length, so that it stands elsewhere in every row
    pattern = torch.randint(256, ((1 << 20) + 1,), dtype=torch.uint8)
    for begin in range(0, num_bytes, len(pattern)):
        part = host[begin : begin + len(pattern)]
        part.copy_(pattern[: len(part)])
    if device.type != "cuda":
        return host
    # pinned memory has one address on both sides
    return bytes_at(host.data_ptr(), host.numel(), device, owner=host)


Arguments = tuple[Any, ...]
KERNELS = "kernels."
# A hot cache has so many slots for each selected position; a pool has so many places for each row that is stored.
CACHE_FACTOR, SPREAD = 4, 64
SLAB_BYTES = 2 << 20


def resolved(setting: Setting) -> Iterator[tuple[Workload, float]]:
    return ((at, hit_rate) for at in setting.workloads for hit_rate in (1.0, 0.9))


def resolve(s: Setting, size: tuple[Workload, float]) -> Sized:
    """Calls share one cache and go round a trace, so that each finds what the one before it left."""
    at, hit_rate = size
    selected = min(s.budget_tokens, at.context // (2 * CACHE_FACTOR))
    num_slots = CACHE_FACTOR * selected
    working_set = num_slots + 2 * selected
    num_steps = 1 if hit_rate == 1 else -(-working_set // round(selected * (1 - hit_rate)))

    @cache
    def shared() -> Arguments:
        heads, candidates = (at.batch, s.heads), range(at.context)
        limited = min(at.context, working_set)
        trace = WindowTrace(*heads, candidates, selected, hit_rate, s.device, working_set=limited)
        steps = s.ints(0, num_steps, 1, *heads, selected)
        for step, out in enumerate(steps):
            trace.select(step, out)
        zeros = s.ints(0, at.batch)
        lanes = SeatLanes(s.seats(at.batch), zeros + num_slots, zeros, zeros + at.context)
        state = empty_state(s, at, num_slots)
        for (required,) in steps:
            fill_reference(state, lanes, required)
        return state, lanes, [each[0] for each in steps]

    rows = at.batch * s.heads
    # a position in, its slot out, whether it was missed, and what is looked up
    return Sized(f"{rows} x {selected}, {hit_rate:.0%} found", rows * selected * 21, shared)


def empty_state(s: Setting, at: Workload, num_slots: int) -> Residency:
    def integers(*size: int, fill: int = 0) -> Tensor:
        return s.ints(fill, at.batch, s.heads, *size, dtype=torch.int32)

    referenced = s.ints(0, at.batch, s.heads, num_slots, dtype=torch.uint8)
    return Residency(integers(at.context, fill=-1), integers(num_slots), referenced, integers(), integers())


def resolve_next(run: Callable[..., Any], state: Residency, lanes: SeatLanes, steps: list[Tensor]) -> object:
    steps.append(steps.pop(0))
    return run(state, lanes, steps[-1])


def resolved_slots(
    run: Callable[..., Any], state: Residency, lanes: SeatLanes, steps: list[Tensor]
) -> Tensor:
    names = ("slot_of", "token_of", "referenced", "hand", "filled")
    copied = replace(state, **{name: getattr(state, name).clone() for name in names})
    slots: Tensor = run(copied, lanes, steps[0])[0]
    return slots


def missing(setting: Setting) -> Iterator[tuple[Workload, float]]:
    return ((at, share) for at in setting.workloads for share in (0.0, 0.1))


def fetch(s: Setting, size: tuple[Workload, float]) -> Sized:
    at, share = size
    selected, rows, heads = min(s.budget_tokens, at.context // 2), at.batch * s.heads, (at.batch, s.heads)
    num_missed = int(share * selected)
    tokens_per_slab = SlabGeometry(Layout(1, s.heads, s.row_format), SLAB_BYTES).tokens_per_slab
    num_slabs, num_blocks = -(-at.context // tokens_per_slab), -(-CACHE_FACTOR * selected // BLOCK_SIZE)

    @cache
    def shared() -> tuple[Tensor, ...]:
        """Arena, slab table, block tables and pool; a layer's slabs of a sequence lie together."""
        slabs = torch.arange(at.batch * num_slabs, dtype=torch.int32, device=s.device)
        blocks = torch.randperm(rows * num_blocks, device=s.device)
        pool = s.normal(blocks.numel() * BLOCK_SIZE, s.row_format.row_elements)
        arena = pinned_bytes(at.batch * num_slabs * SLAB_BYTES, s.device)
        return arena, slabs.view(at.batch, num_slabs), blocks.view(*heads, num_blocks), pool

    def distinct(num_values: int, count: int) -> Tensor:
        return s.uniform(*heads, num_values).topk(count, dim=-1, sorted=False).indices

    def make() -> Arguments:
        arena, slabs, tables, pool = shared()
        is_missed = s.ints(0, *heads, selected, dtype=torch.bool)
        is_missed.scatter_(-1, distinct(selected, num_missed), True)
        required, slots = distinct(at.context, selected), distinct(CACHE_FACTOR * selected, selected)
        layout = ArenaLayout(SLAB_BYTES, tokens_per_slab, s.row_format)
        out = s.ints(0, *heads, selected, dtype=torch.int32)
        return arena, layout, slabs, tables, s.seats(at.batch), required, slots, is_missed, pool, out

    moved = rows * num_missed * s.row_bytes
    # without misses: positions and slots in, rows of the pool out
    return Sized(f"{rows} x {selected}, {share:.0%} missed", moved or rows * selected * 21, make, moved > 0)


def fetched(run: Callable[..., Any], *arguments: Any) -> Tensor:
    *others, pool, out = arguments
    found = torch.zeros_like(pool)
    run(*others, found, out)
    # as bytes: what lies in the arena is not made of numbers
    return found.view(torch.uint8)


def stored(setting: Setting) -> Iterator[tuple[int, bool]]:
    return ((batch, has_arena) for batch in batches(setting) for has_arena in (False, True))


def store_token(s: Setting, size: tuple[int, bool]) -> Sized:
    (batch, has_arena), rows = size, size[0] * s.heads
    arena = cache(lambda: pinned_bytes(rows * SPREAD * s.row_bytes, s.device) if has_arena else None)

    def make() -> Arguments:
        pool = s.normal(rows * SPREAD, s.row_format.row_elements)
        slots = torch.randperm(len(pool), device=s.device)[:rows].view(batch, s.heads)
        keys, values = (s.normal(batch, s.heads, s.dim) for _ in range(2))
        return keys, values, pool, slots, arena(), slots * s.row_bytes if has_arena else None

    # of those to the host, what goes over the bus
    num_bytes = (1 if has_arena else 2) * rows * s.row_bytes
    return Sized(f"{rows} rows to {'pool and host' if has_arena else 'the pool'}", num_bytes, make, has_arena)


def stored_rows(run: Callable[..., Any], keys: Tensor, values: Tensor, pool: Tensor, *rest: Any) -> Arguments:
    (slots, arena, offsets), found = rest, torch.zeros_like(pool)
    run(keys, values, found, slots, None if arena is None else arena.zero_(), offsets)
    return (found,) if arena is None else (found, arena.clone())


def top_k(s: Setting, at: Workload) -> Sized:
    width, rows = min(s.budget_tokens, at.context), at.batch * s.heads

    def make() -> Arguments:
        # as weights of a softmax are: few are large
        scores = s.floats(at.batch, s.heads, at.context).mul_(2).exp_()
        return scores, s.ints(width, at.batch), width

    return Sized(f"{rows} x {at.context} to {width}", rows * (4 * at.context + 8 * width), make)


def torch_top_k(s: Setting, scores: Tensor, _counts: Tensor, width: int) -> Callable[[], object]:
    return lambda: scores.topk(width, dim=-1, sorted=False)


OPERATIONS = {
    "top_k": Operation(
        KERNELS + "top_k", "top_k", workloads, top_k, missed, rival=Rival("torch.topk", torch_top_k)
    ),
    "resolve": Operation(
        KERNELS + "resolve", "resolve", resolved, resolve, mismatch, result=resolved_slots, call=resolve_next
    ),
    "fetch": Operation(
        KERNELS + "rows", "fetch_misses", missing, fetch, result=fetched, kernel="fetch_kernel"
    ),
    "store_token": Operation(KERNELS + "rows", "store_token", stored, store_token, result=stored_rows),
}
