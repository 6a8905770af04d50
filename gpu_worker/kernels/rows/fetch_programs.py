"""The programs of `fetch_kernel.py`: from slots to pool rows, from positions to the arena, and the rows between."""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pool_row(block_table, slot, BLOCK_SIZE: tl.constexpr):
    """Pool rows of a head's logical slots: int64, -1 stays -1."""
    block = tl.load(block_table + slot // BLOCK_SIZE, mask=slot >= 0, other=0)
    return tl.where(slot >= 0, block * BLOCK_SIZE + slot % BLOCK_SIZE, -1)


@triton.jit
def _token_of_arena(slab_table, num_table_slabs, num_slabs, position, head, TOKENS_PER_SLAB: tl.constexpr):
    """The slab in which a position lies, which row it is there, and whether the arena has it."""
    index = position // TOKENS_PER_SLAB
    in_table = (position >= 0) & (index < num_table_slabs)
    slab = tl.load(slab_table + index, mask=in_table, other=-1)
    in_arena = (slab >= 0) & (slab < num_slabs)
    return slab.to(tl.int64), head * TOKENS_PER_SLAB + position % TOKENS_PER_SLAB, in_arena


@triton.jit
def find_rows(
    block_tables,
    block_tables_seat,
    block_tables_head,
    seats,
    slots,
    slots_row,
    slots_head,
    slots_column,
    out,
    out_row,
    out_head,
    num_heads,
    num_columns,
    num_places,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
):
    # PLACES (row, head) of COLUMNS columns each.
    place = tl.program_id(0).to(tl.int64) * PLACES + tl.arange(0, PLACES)[:, None]
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    exists = place < num_places
    row, head = place // num_heads, place % num_heads
    inside = exists & (column < num_columns)
    seat = tl.load(seats + row, mask=exists, other=0)
    at_slot = slots + row * slots_row + head * slots_head + column * slots_column
    slot = tl.load(at_slot, mask=inside, other=-1).to(tl.int64)
    block_table = block_tables + seat * block_tables_seat + head * block_tables_head
    pool_row = _pool_row(block_table, slot, BLOCK_SIZE)
    tl.store(out + row * out_row + head * out_head + column, pool_row.to(tl.int32), mask=inside)


@triton.jit
def find_offsets(
    slab_table,
    num_table_slabs,
    slab_table_seat,
    num_slabs,
    slab_bytes,
    row_bytes,
    seats,
    positions,
    positions_row,
    positions_head,
    positions_column,
    offsets,
    num_heads,
    num_columns,
    num_items,
    TOKENS_PER_SLAB: tl.constexpr,
    ITEMS: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    exists = item < num_items
    place, column = item // num_columns, item % num_columns
    row, head = place // num_heads, place % num_heads
    at_position = positions + row * positions_row + head * positions_head + column * positions_column
    position = tl.load(at_position, mask=exists, other=-1)
    seat = tl.load(seats + row, mask=exists, other=0)
    slab, token, in_arena = _token_of_arena(
        slab_table + seat * slab_table_seat, num_table_slabs, num_slabs, position, head, TOKENS_PER_SLAB
    )
    offset = tl.where(in_arena, slab * slab_bytes + token * row_bytes, -1)
    tl.store(offsets + item, offset, mask=exists)


@triton.jit
def fetch_rows(
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
    out,
    out_row,
    out_head,
    fetched,
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
        is_missed = (tl.load(missed + at, mask=inside, other=0) != 0) & (slot >= 0)
        block_table = block_tables + seat * block_tables_seat + head * block_tables_head
        pool_row = _pool_row(block_table, slot, BLOCK_SIZE)
        tl.store(out + row * out_row + head * out_head + column, pool_row.to(tl.int32), mask=inside)

        at_required = required + row * required_row + head * required_head
        position = tl.load(at_required + column.to(tl.int64) * required_column, mask=is_missed, other=-1)
        slab, token, in_arena = _token_of_arena(
            slab_table + seat * slab_table_seat, num_table_slabs, num_slabs, position, head, TOKENS_PER_SLAB
        )
        if fetched is not None:
            count = tl.sum(in_arena.to(tl.int64), axis=0)
            tl.atomic_add(fetched + seat, count, mask=count > 0, sem="relaxed")
        # Said as products, so that the compiler knows the alignment.
        begin = (slab * slab_units + token * (ROW_WORDS // UNIT)) * UNIT
        mask = in_arena[:, None] & (word < ROW_WORDS)
        rows = tl.load(arena + begin[:, None] + word, mask=mask)
        tl.store(pool + (pool_row * ROW_WORDS)[:, None] + word, rows, mask=mask)
