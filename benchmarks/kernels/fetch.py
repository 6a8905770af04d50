"""Rows of missed positions from host memory into their slots; they come over the link to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.commands.options import Workload
from benchmarks.host_rows import pinned_bytes
from benchmarks.kernels.base import KernelCase, Operands, Setting, load, relative_error
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.rows.reference import ArenaLayout
from kv_store.client.layout import Layout, SlabGeometry

MISS_SHARES = (0.0, 0.1)
SLAB_BYTES = 2 << 20
# slots for each selected position
CACHE_FACTOR = 4


def cases(setting: Setting) -> Iterator[KernelCase]:
    fetch = setting.implementation("kernels.rows", "fetch_misses", module="fetch_kernel")
    reference = load("kernels.rows", "fetch_misses")
    shape = setting.shape
    for workload in setting.workloads:
        selected = min(setting.budget_tokens, workload.context // 2)
        rows = workload.batch * shape.num_kv_heads
        for share in MISS_SHARES:
            num_missed = int(share * selected)
            moved = rows * num_missed * setting.row_format.row_bytes
            yield KernelCase(
                "fetch",
                f"{rows} x {selected}, {share:.0%} missed",
                # without misses: positions and slots in, rows of the pool out
                moved or rows * selected * (8 + 8 + 1 + 4),
                _maker(setting, workload, selected, num_missed, fetch, reference),
                is_from_host=moved > 0,
            )


def _maker(
    setting: Setting,
    workload: Workload,
    selected: int,
    num_missed: int,
    fetch: Callable[..., Any],
    reference: Callable[..., Any],
) -> Callable[[], Operands]:
    shape, device = setting.shape, setting.device
    size = (workload.batch, shape.num_kv_heads)
    slabs = SlabGeometry(Layout(1, shape.num_kv_heads, setting.row_format), SLAB_BYTES)
    tokens_per_slab = slabs.tokens_per_slab
    layout = ArenaLayout(SLAB_BYTES, tokens_per_slab, setting.row_format)
    num_slabs = -(-workload.context // tokens_per_slab)
    num_blocks = -(-CACHE_FACTOR * selected // BLOCK_SIZE)

    @cache
    def shared() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Arena, slab table, block tables, seats and pool; a layer's slabs of a sequence lie together."""
        arena = pinned_bytes(workload.batch * num_slabs * SLAB_BYTES, device)
        slabs = torch.arange(workload.batch * num_slabs, dtype=torch.int32, device=device)
        blocks = torch.randperm(size[0] * size[1] * num_blocks, device=device)
        pool = setting.normal(blocks.numel() * BLOCK_SIZE, setting.row_format.row_elements)
        seats = torch.arange(workload.batch, device=device)
        return arena, slabs.view(workload.batch, num_slabs), blocks.view(*size, num_blocks), seats, pool

    def make() -> Operands:
        arena, slab_table, tables, seats, pool = shared()
        required = _distinct(size, workload.context, selected, device)
        slots = _distinct(size, CACHE_FACTOR * selected, selected, device)
        missed = torch.zeros(*size, selected, dtype=torch.bool, device=device)
        missed.scatter_(-1, _distinct(size, selected, num_missed, device), True)
        out = torch.empty(*size, selected, dtype=torch.int32, device=device)

        def call(move: Callable[..., Any] = fetch, pool: Tensor = pool) -> None:
            move(arena, layout, slab_table, tables, seats, required, slots, missed, pool, out)

        def error() -> float:
            found, wanted = torch.zeros_like(pool), torch.zeros_like(pool)
            call(fetch, found)
            call(reference, wanted)
            # as bytes: what lies in the arena is no number
            return relative_error(found.view(torch.uint8), wanted.view(torch.uint8))

        return Operands(call, error=error)

    return make


def _distinct(size: tuple[int, int], num_values: int, count: int, device: torch.device) -> Tensor:
    """Random different values below num_values: int64 [B, H, count]."""
    return torch.rand(*size, num_values, device=device).topk(count, dim=-1, sorted=False).indices
