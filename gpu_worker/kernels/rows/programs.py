"""The programs of `kernel.py`: rows, pairs, and a step's new tokens."""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


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
