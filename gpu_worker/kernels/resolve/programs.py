"""The programs of `kernel.py`: look up, count, take."""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

# What a byte of `referenced` is while a call runs, besides False and True; no other call sees it.
_NEEDED = tl.constexpr(2)


@triton.jit
def look_up(
    slot_of,
    referenced,
    seats,
    required,
    slots,
    missed,
    num_missed,
    num_heads,
    num_columns,
    slot_of_seat,
    slot_of_head,
    referenced_seat,
    referenced_head,
    required_row,
    required_head,
    required_column,
    COLUMNS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, head = place // num_heads, place % num_heads
    seat = tl.load(seats + row)
    slot_of += seat * slot_of_seat + head * slot_of_head
    referenced += seat * referenced_seat + head * referenced_head
    required += row * required_row + head * required_head
    slots += place * num_columns
    missed += place * num_columns
    total = tl.zeros((), tl.int32)
    for begin in range(0, num_columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = column < num_columns
        position = tl.load(required + column.to(tl.int64) * required_column, mask=inside, other=-1)
        slot = tl.load(slot_of + position, mask=position >= 0, other=-1)
        is_miss = (position >= 0) & (slot < 0)
        tl.store(slots + column, slot.to(tl.int64), mask=inside)
        tl.store(missed + column, is_miss.to(tl.uint8), mask=inside)
        tl.store(referenced + slot, tl.full((COLUMNS,), _NEEDED, tl.uint8), mask=slot >= 0)
        total += tl.sum(is_miss.to(tl.int32), axis=0)
    tl.store(num_missed + place, total)


@triton.jit
def _ring_tile(token_of, referenced, hand, capacity, below, from_, tile, TILE: tl.constexpr):
    """Distances, slots and classes of a tile of the ring: free, clear to evict, set to evict."""
    distance = tile * TILE + tl.arange(0, TILE)
    inside = distance < capacity
    slot = hand + distance
    slot = tl.where(slot >= capacity, slot - capacity, slot)
    token = tl.load(token_of + slot, mask=inside, other=0)
    bit = tl.load(referenced + slot, mask=inside, other=0)
    is_free = inside & (token < 0)
    may_go = inside & (token >= below) & (token < from_) & (token >= 0)
    return distance, slot, is_free, may_go & (bit == 0), may_go & (bit == 1)


@triton.jit
def count(
    token_of,
    referenced,
    hands,
    seats,
    capacities,
    protected_below,
    protected_from,
    num_missed,
    counts,
    num_heads,
    token_of_seat,
    token_of_head,
    referenced_seat,
    referenced_head,
    hand_seat,
    hand_head,
    TILE: tl.constexpr,
):
    place = tl.program_id(1).to(tl.int64)
    tile, num_tiles = tl.program_id(0), tl.num_programs(0)
    if tl.load(num_missed + place) == 0:
        return
    row, head = place // num_heads, place % num_heads
    seat = tl.load(seats + row)
    hand = tl.load(hands + seat * hand_seat + head * hand_head).to(tl.int32)
    capacity = tl.load(capacities + row).to(tl.int32)
    token_of += seat * token_of_seat + head * token_of_head
    referenced += seat * referenced_seat + head * referenced_head
    below, from_ = tl.load(protected_below + row), tl.load(protected_from + row)
    _, _, is_free, is_clear, is_set = _ring_tile(
        token_of, referenced, hand, capacity, below, from_, tile, TILE
    )
    counts += place * 3 * num_tiles + tile
    tl.store(counts, tl.sum(is_free.to(tl.int32), axis=0))
    tl.store(counts + num_tiles, tl.sum(is_clear.to(tl.int32), axis=0))
    tl.store(counts + 2 * num_tiles, tl.sum(is_set.to(tl.int32), axis=0))


@triton.jit
def _take_tile(is_class, before, base, count, distance, slot, victims, reach):
    """Write down the victims of one class in a tile, the `count` first of the class; and how far the hand goes."""
    rank = before + tl.cumsum(is_class.to(tl.int32), axis=0) - 1
    taken = is_class & (rank < count)
    tl.store(victims + base + rank, slot, mask=taken)
    return tl.maximum(reach, tl.max(tl.where(taken, distance, -1), axis=0))


@triton.jit
def take(
    slot_of,
    token_of,
    referenced,
    hands,
    seats,
    capacities,
    protected_below,
    protected_from,
    required,
    slots,
    missed,
    num_missed,
    counts,
    victims,
    num_heads,
    num_columns,
    num_tiles,
    slot_of_seat,
    slot_of_head,
    token_of_seat,
    token_of_head,
    referenced_seat,
    referenced_head,
    hand_seat,
    hand_head,
    required_row,
    required_head,
    required_column,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, head = place // num_heads, place % num_heads
    seat = tl.load(seats + row)
    slot_of += seat * slot_of_seat + head * slot_of_head
    token_of += seat * token_of_seat + head * token_of_head
    referenced += seat * referenced_seat + head * referenced_head
    hands += seat * hand_seat + head * hand_head
    required += row * required_row + head * required_head
    slots += place * num_columns
    missed += place * num_columns
    victims += place * num_columns
    counts += place * 3 * num_tiles
    total = tl.load(num_missed + place)
    if total > 0:
        capacity = tl.load(capacities + row).to(tl.int32)
        hand = tl.load(hands).to(tl.int32)
        below, from_ = tl.load(protected_below + row), tl.load(protected_from + row)
        every = tl.arange(0, TILES)
        exists = every < num_tiles
        num_free = tl.sum(tl.load(counts + every, mask=exists, other=0), axis=0)
        num_clear = tl.sum(tl.load(counts + num_tiles + every, mask=exists, other=0), axis=0)
        num_set = tl.sum(tl.load(counts + 2 * num_tiles + every, mask=exists, other=0), axis=0)
        num_free = tl.minimum(num_free, total)
        num_clear = tl.minimum(num_clear, total - num_free)
        num_set = tl.minimum(num_set, total - num_free - num_clear)
        num_found = num_free + num_clear + num_set

        tile = tl.zeros((), tl.int32)
        free_before = tl.zeros((), tl.int32)
        clear_before = tl.zeros((), tl.int32)
        set_before = tl.zeros((), tl.int32)
        reach = tl.full((), -1, tl.int32)
        while (free_before < num_free) | (clear_before < num_clear) | (set_before < num_set):
            free_here = tl.load(counts + tile)
            clear_here = tl.load(counts + num_tiles + tile)
            set_here = tl.load(counts + 2 * num_tiles + tile)
            takes_free = (free_before < num_free) & (free_here > 0)
            takes_clear = (clear_before < num_clear) & (clear_here > 0)
            takes_set = (set_before < num_set) & (set_here > 0)
            if takes_free | takes_clear | takes_set:
                distance, slot, is_free, is_clear, is_set = _ring_tile(
                    token_of, referenced, hand, capacity, below, from_, tile, TILE
                )
                reach = _take_tile(is_free, free_before, 0, num_free, distance, slot, victims, reach)
                reach = _take_tile(
                    is_clear, clear_before, num_free, num_clear, distance, slot, victims, reach
                )
                reach = _take_tile(
                    is_set, set_before, num_free + num_clear, num_set, distance, slot, victims, reach
                )
            free_before += free_here
            clear_before += clear_here
            set_before += set_here
            tile += 1
        tl.store(hands, (hand + reach + 1) % capacity)
        # Who took a set bit went round in vain before: all are cleared.
        cleared = tl.where(num_set > 0, capacity, reach + 1)
        # Victims are read by other threads than wrote them, and bits are cleared only when all have been read.
        tl.debug_barrier()
        for begin in range(0, cleared, TILE):
            distance = begin + tl.arange(0, TILE)
            slot = hand + distance
            slot = tl.where(slot >= capacity, slot - capacity, slot)
            tl.store(referenced + slot, tl.zeros((TILE,), tl.uint8), mask=distance < cleared)

        before = tl.zeros((), tl.int32)
        for begin in range(0, num_columns, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = column < num_columns
            is_miss = tl.load(missed + column, mask=inside, other=0) != 0
            rank = before + tl.cumsum(is_miss.to(tl.int32), axis=0) - 1
            # Beyond the room that the caller promised, a miss gets no slot.
            is_placed = is_miss & (rank < num_found)
            position = tl.load(required + column.to(tl.int64) * required_column, mask=is_placed, other=0)
            slot = tl.load(victims + rank, mask=is_placed, other=0)
            # An evicted token is none of the required, so these stores never meet.
            evicted = tl.load(token_of + slot, mask=is_placed, other=-1)
            # Where threads outnumber columns, several hold the same one: all have read before any writes.
            tl.debug_barrier()
            tl.store(slot_of + evicted, tl.full((COLUMNS,), -1, tl.int32), mask=evicted >= 0)
            tl.store(slot_of + position, slot, mask=is_placed)
            tl.store(token_of + slot, position.to(tl.int32), mask=is_placed)
            tl.store(slots + column, slot.to(tl.int64), mask=is_placed)
            before += tl.sum(is_miss.to(tl.int32), axis=0)
        tl.debug_barrier()
    for begin in range(0, num_columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        slot = tl.load(slots + column, mask=column < num_columns, other=-1)
        tl.store(referenced + slot, tl.full((COLUMNS,), 1, tl.uint8), mask=slot >= 0)
