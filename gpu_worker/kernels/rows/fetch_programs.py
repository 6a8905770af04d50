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


@triton.jit(do_not_specialize=["num_places"], do_not_specialize_on_alignment=["seats", "slots"])
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


@triton.jit(do_not_specialize=["num_items"], do_not_specialize_on_alignment=["seats", "positions"])
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


@triton.jit(do_not_specialize_on_alignment=["seats"])
def list_misses(
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
    out,
    out_row,
    out_head,
    fetched,
    sources,
    targets,
    counts,
    num_heads,
    num_columns,
    TOKENS_PER_SLAB: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program for each (lane, head): pool rows of its slots, and a list of the rows to copy, from where to where."""
    place = tl.program_id(0).to(tl.int64)
    row, head = place // num_heads, place % num_heads
    seat = tl.load(seats + row)
    block_table = block_tables + seat * block_tables_seat + head * block_tables_head
    slots += place * num_columns
    missed += place * num_columns
    sources += place * num_columns
    targets += place * num_columns
    required += row * required_row + head * required_head
    out += row * out_row + head * out_head
    count = tl.zeros((), tl.int32)
    for first in range(0, num_columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < num_columns
        slot = tl.load(slots + column, mask=inside, other=-1)
        is_missed = (tl.load(missed + column, mask=inside, other=0) != 0) & (slot >= 0)
        pool_row = _pool_row(block_table, slot, BLOCK_SIZE)
        tl.store(out + column, pool_row.to(tl.int32), mask=inside)
        position = tl.load(required + column.to(tl.int64) * required_column, mask=is_missed, other=-1)
        slab, token, in_arena = _token_of_arena(
            slab_table + seat * slab_table_seat, num_table_slabs, num_slabs, position, head, TOKENS_PER_SLAB
        )
        rank = count + tl.cumsum(in_arena.to(tl.int32), axis=0) - 1
        tl.store(sources + rank, slab * slab_units + token * ROW_UNITS, mask=in_arena)
        tl.store(targets + rank, pool_row.to(tl.int32), mask=in_arena)
        count += tl.sum(in_arena.to(tl.int32), axis=0)
    tl.store(counts + place, count)
    if fetched is not None:
        tl.atomic_add(fetched + seat, count.to(tl.int64), mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_places"])
def copy_misses(
    arena,
    sources,
    targets,
    counts,
    pool,
    num_places,
    num_columns,
    ROW_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The programs share out the tiles of ROWS listed rows in the order of the lists."""
    every = tl.arange(0, PLACES)
    tiles = tl.cdiv(tl.load(counts + every, mask=every < num_places, other=0), ROWS)
    ends = tl.cumsum(tiles, axis=0)
    word = tl.arange(0, WORDS)[None, :]
    for item in range(tl.program_id(0), tl.max(ends, axis=0), tl.num_programs(0)):
        place = tl.sum((ends <= item).to(tl.int32), axis=0).to(tl.int64)
        tile = item - tl.max(tl.where(ends <= item, ends, 0), axis=0)
        entry = tile * ROWS + tl.arange(0, ROWS)
        listed = entry < tl.load(counts + place)
        source = tl.load(sources + place * num_columns + entry, mask=listed, other=0)
        target = tl.load(targets + place * num_columns + entry, mask=listed, other=0).to(tl.int64)
        mask = listed[:, None] & (word < ROW_WORDS)
        # Said as products, so that the compiler knows the alignment.
        rows = tl.load(arena + (source * UNIT)[:, None] + word, mask=mask)
        tl.store(pool + (target * ROW_WORDS)[:, None] + word, rows, mask=mask)
