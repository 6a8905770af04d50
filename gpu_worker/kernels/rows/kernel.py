"""Rows copied by the GPU itself, the arena's straight over the bus from registered host memory.

_copy_rows and _copy_pairs, a program for every 16 rows: 512-byte rows are one 16-byte access of each of 32 threads, and
a program has 8 KiB under way. What the bus needs to be busy (46 GB/s at about 2 µs) is 90 KiB, a dozen programs.

_fetch, at most PROGRAMS programs that share out the list (row, KV head, 32 columns) in its order: what is under way at
one time lies within a head or a few, because reads spread over gigabytes of host memory are less than half as fast.
Hits cost a look at the block table; a miss costs its row once over the bus.
"""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.rows.reference import ArenaLayout

ROWS = 16
COLUMNS = 32
# Eight on each of an H200's 132 multiprocessors.
PROGRAMS = 1056

# Rows are moved in words of 4 bytes; UNIT is how many of them every offset and row is a multiple of.
WORD_BYTES = 4


def _unit(row_bytes: int) -> int:
    """Words that rows are aligned to: 4 let every access be one of 16 bytes."""
    if row_bytes % WORD_BYTES:
        raise ValueError(f"rows of {row_bytes} bytes cannot be copied in words of {WORD_BYTES}")
    return 4 if row_bytes % 16 == 0 else 2 if row_bytes % 8 == 0 else 1


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


def _arena_words(arena: Tensor) -> Tensor:
    return _words(arena[: arena.shape[0] // WORD_BYTES * WORD_BYTES])


@triton.jit
def _copy_rows(
    arena,
    arena_bytes,
    offsets,
    pool,
    slots,
    num_rows,
    ROW_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    TO_ARENA: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offset = tl.load(offsets + row, mask=row < num_rows, other=-1)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    wanted = (offset >= 0) & (offset <= arena_bytes - 4 * ROW_WORDS) & (slot >= 0)
    # Said as a product, so that the compiler knows the alignment.
    at_arena = arena + (offset // (4 * UNIT) * UNIT)[:, None]
    at_pool = pool + (slot * ROW_WORDS)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    mask = wanted[:, None] & (word < ROW_WORDS)
    if TO_ARENA:
        tl.store(at_arena + word, tl.load(at_pool + word, mask=mask), mask=mask)
    else:
        tl.store(at_pool + word, tl.load(at_arena + word, mask=mask), mask=mask)


@triton.jit
def _copy_pairs(
    arena,
    arena_bytes,
    offsets,
    keys,
    values,
    num_rows,
    num_inner,
    offsets_outer,
    offsets_inner,
    keys_outer,
    keys_inner,
    values_outer,
    values_inner,
    HALF_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    TO_ARENA: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outer, inner = row // num_inner, row % num_inner
    at_offset = offsets + outer * offsets_outer + inner * offsets_inner
    offset = tl.load(at_offset, mask=row < num_rows, other=-1)
    wanted = (offset >= 0) & (offset <= arena_bytes - 8 * HALF_WORDS)
    word = tl.arange(0, WORDS)[None, :]
    mask = wanted[:, None] & (word < HALF_WORDS)
    at_arena = arena + (offset // (4 * UNIT) * UNIT)[:, None] + word
    at_key = keys + (outer * keys_outer + inner * keys_inner)[:, None] + word
    at_value = values + (outer * values_outer + inner * values_inner)[:, None] + word
    if TO_ARENA:
        key, value = tl.load(at_key, mask=mask), tl.load(at_value, mask=mask)
        tl.store(at_arena, key, mask=mask)
        tl.store(at_arena + HALF_WORDS, value, mask=mask)
    else:
        key, value = tl.load(at_arena, mask=mask), tl.load(at_arena + HALF_WORDS, mask=mask)
        tl.store(at_key, key, mask=mask)
        tl.store(at_value, value, mask=mask)


@triton.jit
def _fetch(
    arena,
    num_slabs,
    slab_units,
    slab_table,
    num_table_slabs,
    slab_table_seat,
    block_tables,
    block_tables_seat,
    block_tables_head,
    seats,
    required,
    required_row,
    required_head,
    required_column,
    slots,
    missed,
    pool,
    pool_slots,
    num_heads,
    num_columns,
    num_items,
    TOKENS_PER_SLAB: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
):
    items_per_head = tl.cdiv(num_columns, COLUMNS)
    word = tl.arange(0, WORDS)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        place = (item // items_per_head).to(tl.int64)
        row, head = place // num_heads, place % num_heads
        column = item % items_per_head * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < num_columns
        at = place * num_columns + column
        seat = tl.load(seats + row)
        slot = tl.load(slots + at, mask=inside, other=-1)
        has_slot = slot >= 0
        at_block = block_tables + seat * block_tables_seat + head * block_tables_head + slot // BLOCK_SIZE
        block = tl.load(at_block, mask=has_slot, other=0)
        pool_slot = tl.where(has_slot, block * BLOCK_SIZE + slot % BLOCK_SIZE, -1)
        tl.store(pool_slots + at, pool_slot, mask=inside)

        is_missed = (tl.load(missed + at, mask=inside, other=0) != 0) & has_slot
        at_required = required + row * required_row + head * required_head
        position = tl.load(at_required + column.to(tl.int64) * required_column, mask=is_missed, other=-1)
        index = position // TOKENS_PER_SLAB
        in_table = (position >= 0) & (index < num_table_slabs)
        slab = tl.load(slab_table + seat * slab_table_seat + index, mask=in_table, other=-1)
        in_arena = (slab >= 0) & (slab < num_slabs)
        token = head * TOKENS_PER_SLAB + position % TOKENS_PER_SLAB
        begin = (slab.to(tl.int64) * slab_units + token * (ROW_WORDS // UNIT)) * UNIT
        mask = in_arena[:, None] & (word < ROW_WORDS)
        fetched = tl.load(arena + begin[:, None] + word, mask=mask)
        tl.store(pool + (pool_slot * ROW_WORDS)[:, None] + word, fetched, mask=mask)


def _launch_rows(arena: Tensor, offsets: Tensor, pool: Tensor, slots: Tensor, to_arena: bool) -> None:
    num_rows = offsets.numel()
    if num_rows == 0:
        return
    assert pool.is_contiguous(), "the pool is written in place"
    words = _words(pool)
    _copy_rows[(triton.cdiv(num_rows, ROWS),)](
        _arena_words(arena),
        arena.shape[0],
        offsets.contiguous(),
        words,
        slots.contiguous(),
        num_rows,
        ROW_WORDS=words.shape[1],
        UNIT=_unit(words.shape[1] * WORD_BYTES),
        TO_ARENA=to_arena,
        ROWS=ROWS,
        WORDS=triton.next_power_of_2(words.shape[1]),
        num_warps=4,
    )


def gather_rows(arena: Tensor, offsets: Tensor, pool: Tensor, slots: Tensor) -> None:
    """See the reference. The arena may lie in host memory that is registered with CUDA."""
    _launch_rows(arena, offsets, pool, slots, to_arena=False)


def scatter_rows(arena: Tensor, offsets: Tensor, pool: Tensor, slots: Tensor) -> None:
    """See the reference. The arena may lie in host memory that is registered with CUDA."""
    _launch_rows(arena, offsets, pool, slots, to_arena=True)


def _launch_pairs(arena: Tensor, offsets: Tensor, keys: Tensor, values: Tensor, to_arena: bool) -> None:
    num_rows = offsets.numel()
    if num_rows == 0:
        return
    keys, values = _words(keys), _words(values)
    half_words = keys.shape[2]
    _copy_pairs[(triton.cdiv(num_rows, ROWS),)](
        _arena_words(arena),
        arena.shape[0],
        offsets,
        keys,
        values,
        num_rows,
        offsets.shape[1],
        *offsets.stride(),
        *keys.stride()[:2],
        *values.stride()[:2],
        HALF_WORDS=half_words,
        UNIT=_unit(half_words * WORD_BYTES),
        TO_ARENA=to_arena,
        ROWS=ROWS,
        WORDS=triton.next_power_of_2(half_words),
        num_warps=4,
    )


def gather_pairs(arena: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
    """See the reference. The arena may lie in host memory that is registered with CUDA."""
    _launch_pairs(arena, offsets, keys, values, to_arena=False)


def scatter_pairs(arena: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
    """See the reference. The arena may lie in host memory that is registered with CUDA."""
    _launch_pairs(arena, offsets, keys, values, to_arena=True)


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
) -> Tensor:
    """See the reference. The arena may lie in host memory that is registered with CUDA; slab_bytes is as aligned as
    rows are."""
    batch, num_heads, num_columns = slots.shape
    pool_slots = torch.empty((batch, num_heads, num_columns), dtype=torch.int64, device=slots.device)
    num_items = batch * num_heads * triton.cdiv(num_columns, COLUMNS)
    if num_items == 0:
        return pool_slots
    assert pool.is_contiguous(), "the pool is written in place"
    unit = _unit(layout.row_bytes)
    if layout.slab_bytes % (unit * WORD_BYTES):
        raise ValueError(
            f"slabs of {layout.slab_bytes} bytes: with rows of {layout.row_bytes} bytes they must be a multiple "
            f"of {unit * WORD_BYTES}"
        )
    row_words = layout.row_bytes // WORD_BYTES
    _fetch[(min(PROGRAMS, num_items),)](
        _arena_words(arena),
        arena.shape[0] // layout.slab_bytes,
        layout.slab_bytes // (unit * WORD_BYTES),
        slab_table,
        slab_table.shape[1],
        slab_table.stride(0),
        block_tables,
        block_tables.stride(0),
        block_tables.stride(1),
        seats.contiguous(),
        required,
        *required.stride(),
        slots.contiguous(),
        missed.contiguous().view(torch.uint8),
        _words(pool),
        pool_slots,
        num_heads,
        num_columns,
        num_items,
        TOKENS_PER_SLAB=layout.tokens_per_slab,
        BLOCK_SIZE=BLOCK_SIZE,
        ROW_WORDS=row_words,
        UNIT=unit,
        COLUMNS=COLUMNS,
        WORDS=triton.next_power_of_2(row_words),
        num_warps=4,
    )
    return pool_slots
