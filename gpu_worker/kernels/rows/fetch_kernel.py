"""Kernels that follow `resolve` on the GPU: pool rows of the slots, and the misses' rows out of the arena.

`list_misses`, a program for each (lane, KV head), translates the slots and lists the misses. `copy_misses`, PROGRAMS
programs, copies what is listed, in the order of the lists: the bus needs some hundred rows in flight, and reads that
are spread over gigabytes of host memory are less than half as fast, so more programs would be slower.

`find_rows` and `find_offsets` do one half of it each, for callers that need no more.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.rows.fetch_programs import copy_misses, find_offsets, find_rows, list_misses
from gpu_worker.kernels.rows.kernel import WORD_BYTES, arena_words, unit_of, words
from gpu_worker.kernels.rows.reference import ArenaLayout

# Columns that a program of `list_misses` takes at a time.
COLUMNS = 1024
# Rows that a program copies at a time, and how many programs there are.
ROWS = 16
PROGRAMS = 96
# Of `find_rows` and `find_offsets`.
ITEMS = 512


def fetch_misses(
    arena: Tensor,
    layout: ArenaLayout,
    slab_table: Tensor,
    block_tables: Tensor,
    seats: Tensor,
    required: Tensor,
    slots: Tensor,
    missed: Tensor,
    pool: Tensor,
    out: Tensor,
    fetched: Tensor | None = None,
) -> None:
    """See the reference. The arena may lie in host memory that is registered with CUDA.

    Raises ValueError where slabs are not as aligned as rows are.
    """
    _, num_heads, num_columns = slots.shape
    if slots.numel() == 0:
        return
    assert pool.is_contiguous(), "the pool is written in place"
    assert out.stride(2) == slab_table.stride(1) == block_tables.stride(2) == 1
    row_bytes = layout.row_format.row_bytes
    unit = unit_of(row_bytes)
    if layout.slab_bytes % (unit * WORD_BYTES):
        raise ValueError(
            f"slabs of {layout.slab_bytes} bytes: with rows of {row_bytes} bytes they must be a multiple "
            f"of {unit * WORD_BYTES}"
        )
    row_words = row_bytes // WORD_BYTES
    num_places = slots.shape[0] * num_heads
    sources = torch.empty(num_places, num_columns, dtype=torch.int64, device=slots.device)
    targets = torch.empty(num_places, num_columns, dtype=torch.int32, device=slots.device)
    counts = torch.empty(num_places, dtype=torch.int32, device=slots.device)
    columns = min(COLUMNS, triton.next_power_of_2(num_columns))
    list_misses[(num_places,)](
        arena.shape[0] // layout.slab_bytes,
        layout.slab_bytes // (unit * WORD_BYTES),
        slab_table,
        slab_table.shape[1],
        slab_table.stride(0),
        block_tables,
        *block_tables.stride()[:2],
        seats.contiguous(),
        required,
        *required.stride(),
        slots.contiguous(),
        missed.contiguous().view(torch.uint8),
        out,
        *out.stride()[:2],
        fetched,
        sources,
        targets,
        counts,
        num_heads,
        num_columns,
        TOKENS_PER_SLAB=layout.tokens_per_slab,
        BLOCK_SIZE=BLOCK_SIZE,
        ROW_UNITS=row_words // unit,
        COLUMNS=columns,
        num_warps=max(1, min(8, columns // 128)),
    )
    copy_misses[(min(PROGRAMS, num_places * triton.cdiv(num_columns, ROWS)),)](
        arena_words(arena),
        sources,
        targets,
        counts,
        words(pool),
        num_places,
        num_columns,
        ROW_WORDS=row_words,
        UNIT=unit,
        # Of every batch, so that it is compiled once.
        PLACES=triton.next_power_of_2(max(num_places, block_tables.shape[0] * num_heads)),
        ROWS=ROWS,
        WORDS=triton.next_power_of_2(row_words),
        num_warps=4,
    )


def pool_rows(block_tables: Tensor, seats: Tensor, slots: Tensor, out: Tensor) -> None:
    """See the reference. `slots` may have any strides."""
    batch, num_heads, num_columns = slots.shape
    if slots.numel() == 0:
        return
    assert out.stride(2) == block_tables.stride(2) == 1
    columns = min(ITEMS, triton.next_power_of_2(num_columns))
    num_places, places = batch * num_heads, ITEMS // columns
    find_rows[(triton.cdiv(num_places, places), triton.cdiv(num_columns, columns))](
        block_tables,
        *block_tables.stride()[:2],
        seats.contiguous(),
        slots,
        *slots.stride(),
        out,
        *out.stride()[:2],
        num_heads,
        num_columns,
        num_places,
        BLOCK_SIZE=BLOCK_SIZE,
        COLUMNS=columns,
        PLACES=places,
        num_warps=4,
    )


def offsets_by_table(
    slab_table: Tensor, seats: Tensor, positions: Tensor, layout: ArenaLayout, num_slabs: int
) -> Tensor:
    """See the reference. `positions` may have any strides."""
    offsets = torch.empty(positions.shape, dtype=torch.int64, device=positions.device)
    num_items = positions.numel()
    if num_items == 0:
        return offsets
    assert slab_table.stride(1) == 1
    find_offsets[(triton.cdiv(num_items, ITEMS),)](
        slab_table,
        slab_table.shape[1],
        slab_table.stride(0),
        num_slabs,
        layout.slab_bytes,
        layout.row_format.row_bytes,
        seats.contiguous(),
        positions,
        *positions.stride(),
        offsets,
        *positions.shape[1:],
        num_items,
        TOKENS_PER_SLAB=layout.tokens_per_slab,
        ITEMS=ITEMS,
        num_warps=4,
    )
    return offsets
