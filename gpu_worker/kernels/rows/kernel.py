"""Rows copied by the GPU itself, the arena's straight over the bus from registered host memory.

`copy_rows` and `copy_pairs`, a program for every 16 rows: 512-byte rows are one 16-byte access of each of 32 threads,
and a program has 8 KiB under way. What the bus needs to be busy (46 GB/s at about 2 µs) is 90 KiB, a dozen programs.

`store_rows`, a program of one warp for every 4 rows: a decode step has few, and nothing but its latency counts.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.row_format import row_format

WORD_BYTES = 4

ROWS = 16
ROWS_PER_WARP = 4


def gather_rows(arena: Tensor, offsets: Tensor, pool: Tensor, slots: Tensor) -> None:
    """See the reference. The arena may lie in host memory that is registered with CUDA."""
    _launch_rows(arena, offsets, pool, slots, to_arena=False)


def scatter_rows(arena: Tensor, offsets: Tensor, pool: Tensor, slots: Tensor) -> None:
    """See the reference. The arena may lie in host memory that is registered with CUDA."""
    _launch_rows(arena, offsets, pool, slots, to_arena=True)


def gather_pairs(arena: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
    """See the reference. The arena may lie in host memory that is registered with CUDA."""
    _launch_pairs(arena, offsets, keys, values, to_arena=False)


def scatter_pairs(arena: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
    """See the reference. The arena may lie in host memory that is registered with CUDA."""
    _launch_pairs(arena, offsets, keys, values, to_arena=True)


def store_token(
    keys: Tensor,
    values: Tensor,
    pool: Tensor,
    slots: Tensor,
    arena: Tensor | None = None,
    offsets: Tensor | None = None,
) -> None:
    """See the reference. The arena may lie in host memory that is registered with CUDA."""
    num_rows = slots.numel()
    if num_rows == 0:
        return
    assert pool.is_contiguous(), "the pool is written in place"
    keys, values, rows = words(keys), words(values), words(pool)
    half_words = keys.shape[2]
    store_rows[(triton.cdiv(num_rows, ROWS_PER_WARP),)](
        keys,
        values,
        rows,
        slots,
        None if arena is None else arena_words(arena),
        0 if arena is None else arena.shape[0],
        offsets,
        num_rows,
        keys.shape[1],
        *keys.stride()[:2],
        *values.stride()[:2],
        *slots.stride(),
        *((0, 0) if offsets is None else offsets.stride()),
        HALF_WORDS=half_words,
        ROW_WORDS=rows.shape[1],
        UNIT=unit_of(half_words * WORD_BYTES),
        ROWS=ROWS_PER_WARP,
        WORDS=triton.next_power_of_2(half_words),
        num_warps=1,
    )


def _launch_rows(arena: Tensor, offsets: Tensor, pool: Tensor, slots: Tensor, to_arena: bool) -> None:
    num_rows = offsets.numel()
    if num_rows == 0:
        return
    assert pool.is_contiguous(), "the pool is written in place"
    row_words = words(pool)
    copy_rows[(triton.cdiv(num_rows, ROWS),)](
        arena_words(arena),
        arena.shape[0],
        offsets.contiguous(),
        row_words,
        slots.contiguous(),
        num_rows,
        ROW_WORDS=row_words.shape[1],
        UNIT=unit_of(row_words.shape[1] * WORD_BYTES),
        TO_ARENA=to_arena,
        ROWS=ROWS,
        WORDS=triton.next_power_of_2(row_words.shape[1]),
        num_warps=4,
    )


def _launch_pairs(arena: Tensor, offsets: Tensor, keys: Tensor, values: Tensor, to_arena: bool) -> None:
    num_rows = offsets.numel()
    if num_rows == 0:
        return
    row_words = row_format(keys.shape[2], keys.dtype).row_bytes // WORD_BYTES
    keys, values = words(keys), words(values)
    half_words = keys.shape[2]
    copy_pairs[(triton.cdiv(num_rows, ROWS),)](
        arena_words(arena),
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
        ROW_WORDS=row_words,
        UNIT=unit_of(half_words * WORD_BYTES),
        TO_ARENA=to_arena,
        ROWS=ROWS,
        WORDS=triton.next_power_of_2(half_words),
        num_warps=4,
    )


def unit_of(row_bytes: int) -> int:
    """Words that offsets and rows are multiples of: 4 let every access be one of 16 bytes.

    Raises ValueError for rows that are no whole words.
    """
    if row_bytes % WORD_BYTES:
        raise ValueError(f"rows of {row_bytes} bytes cannot be copied in words of {WORD_BYTES}")
    return 4 if row_bytes % 16 == 0 else 2 if row_bytes % 8 == 0 else 1


def words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


def arena_words(arena: Tensor) -> Tensor:
    return words(arena[: arena.shape[0] // WORD_BYTES * WORD_BYTES])


@triton.jit(do_not_specialize=["num_rows"])
def copy_rows(
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
    slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int64)
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


@triton.jit(do_not_specialize=["num_rows"])
def copy_pairs(
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
    ROW_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    TO_ARENA: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outer, inner = row // num_inner, row % num_inner
    at_offset = offsets + outer * offsets_outer + inner * offsets_inner
    offset = tl.load(at_offset, mask=row < num_rows, other=-1)
    wanted = (offset >= 0) & (offset <= arena_bytes - 4 * ROW_WORDS)
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


@triton.jit(do_not_specialize=["num_rows"])
def store_rows(
    keys,
    values,
    pool,
    slots,
    arena,
    arena_bytes,
    offsets,
    num_rows,
    num_heads,
    keys_row,
    keys_head,
    values_row,
    values_head,
    slots_row,
    slots_head,
    offsets_row,
    offsets_head,
    HALF_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = place < num_rows
    row, head = place // num_heads, place % num_heads
    word = tl.arange(0, WORDS)[None, :]
    inside = word < HALF_WORDS
    mask = exists[:, None] & inside
    # Read in any case: only the stores wait for slots and offsets.
    key = tl.load(keys + (row * keys_row + head * keys_head)[:, None] + word, mask=mask)
    value = tl.load(values + (row * values_row + head * values_head)[:, None] + word, mask=mask)
    slot = tl.load(slots + row * slots_row + head * slots_head, mask=exists, other=-1).to(tl.int64)
    at_pool = pool + (slot * ROW_WORDS)[:, None] + word
    mask = (slot >= 0)[:, None] & inside
    tl.store(at_pool, key, mask=mask)
    tl.store(at_pool + HALF_WORDS, value, mask=mask)
    if arena is not None:
        offset = tl.load(offsets + row * offsets_row + head * offsets_head, mask=exists, other=-1)
        wanted = (offset >= 0) & (offset <= arena_bytes - 4 * ROW_WORDS)
        at_arena = arena + (offset // (4 * UNIT) * UNIT)[:, None] + word
        mask = wanted[:, None] & inside
        tl.store(at_arena, key, mask=mask)
        tl.store(at_arena + HALF_WORDS, value, mask=mask)
