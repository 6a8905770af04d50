"""New rows of a decode step, of one layer, into the pool, and into host memory; each is read and written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.host_rows import pinned_bytes
from benchmarks.kernels.base import KernelCase, Operands, Setting, relative_error

# places for each new row: they lie far apart, as those of a hot cache and of the arena do
SPREAD = 64


def cases(setting: Setting) -> Iterator[KernelCase]:
    store, reference = setting.both("kernels.rows", "store_token")
    row_bytes = setting.row_format.row_bytes
    for batch in sorted({workload.batch for workload in setting.workloads}):
        rows = batch * setting.shape.num_kv_heads
        yield KernelCase(
            "store_token",
            f"{rows} rows to the pool",
            2 * rows * row_bytes,
            _maker(setting, batch, False, store, reference),
        )
        yield KernelCase(
            "store_token",
            f"{rows} rows to pool and host",
            # what goes over the bus
            rows * row_bytes,
            _maker(setting, batch, True, store, reference),
            is_from_host=True,
        )


def _maker(
    setting: Setting, batch: int, has_arena: bool, store: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[[], Operands]:
    shape, device = setting.shape, setting.device
    size = (batch, shape.num_kv_heads)
    num_places = batch * shape.num_kv_heads * SPREAD
    row_bytes = setting.row_format.row_bytes

    @cache
    def shared() -> Tensor | None:
        return pinned_bytes(num_places * row_bytes, device) if has_arena else None

    def make() -> Operands:
        keys, values = setting.normal(*size, shape.head_dim), setting.normal(*size, shape.head_dim)
        pool = setting.normal(num_places, setting.row_format.row_elements)
        slots = torch.randperm(num_places, device=device)[: batch * shape.num_kv_heads].view(size)
        arena, offsets = shared(), slots * row_bytes if has_arena else None

        def error() -> float:
            found, wanted = torch.zeros_like(pool), torch.zeros_like(pool)
            store(keys, values, found, slots, None if arena is None else arena.zero_(), offsets)
            stored = None if arena is None else arena.clone()
            reference(keys, values, wanted, slots, None if arena is None else arena.zero_(), offsets)
            pool_error = relative_error(found, wanted)
            if arena is None or stored is None:
                return pool_error
            # as bytes: the arena has no type
            return max(pool_error, relative_error(stored, arena))

        return Operands(lambda: store(keys, values, pool, slots, arena, offsets), error=error)

    return make
