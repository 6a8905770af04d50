"""The hot cache's clock on the GPU, in one launch and without the host.

`resolve_head`, a program for each (lane, head), looks up its positions. Where some miss, it walks the ring from the
hand on, tile by tile, until enough victims are found, commonly in the first or second tile; then it writes the new
entries. A head's ring is its own, so programs share nothing. A program is bound by the latency of a few dependent
reads: it has as many threads as there are columns, and a tile of the ring is eight slots of each.

A new token's slots in all layers are one column of many heads: thousands of programs of one warp.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.resolve.reference import Residency, SeatLanes

# Positions and slots of the ring that a program handles at a time, at most.
COLUMNS = 2048
TILE = 2048
COLUMNS_PER_WARP = 128
TILE_PER_WARP = 256
MAX_WARPS = 8
# What a bit is set to while a call runs, where the slot is required: it is not evicted.
_NEEDED = tl.constexpr(2)


def resolve(residency: Residency, rows: SeatLanes, required: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference: the same slots, misses and state, to the bit. `required` may have any strides."""
    slots = torch.empty(required.shape, dtype=torch.int64, device=required.device)
    missed = torch.empty(required.shape, dtype=torch.bool, device=required.device)
    victims = torch.empty(required.shape, dtype=torch.int32, device=required.device)
    batch, num_heads, num_columns = required.shape
    if required.numel() == 0:
        return slots, missed
    slot_of, token_of, referenced = residency.slot_of, residency.token_of, residency.referenced
    assert slot_of.stride(2) == token_of.stride(2) == referenced.stride(2) == 1, "slots are contiguous"
    of_seats = (rows.seats, rows.capacities, rows.protected_below, rows.protected_from)
    columns = triton.next_power_of_2(num_columns)
    num_warps = min(MAX_WARPS, max(1, columns // COLUMNS_PER_WARP))
    resolve_head[(batch * num_heads,)](
        slot_of,
        token_of,
        referenced,
        residency.hand,
        residency.filled,
        *(field.contiguous() for field in of_seats),
        required,
        slots,
        missed.view(torch.uint8),
        victims,
        num_heads,
        num_columns,
        *slot_of.stride()[:2],
        *token_of.stride()[:2],
        *referenced.stride()[:2],
        *residency.hand.stride(),
        *residency.filled.stride(),
        *required.stride(),
        # A thread to a column at least: no two of them hold the same one.
        COLUMNS=min(COLUMNS, max(32, columns)),
        TILE=min(TILE, TILE_PER_WARP * num_warps),
        num_warps=num_warps,
    )
    return slots, missed


@triton.jit
def _evict(
    token_of,
    referenced,
    victims,
    hand,
    capacity,
    filled,
    below,
    from_,
    wanted,
    TILE: tl.constexpr,
):
    """Write down the slots to evict, and clear the bits that the hand passes. How many it found, and the new hand.

    Two rounds at most: a first round that finds too few clear bits has cleared all others by its end. It may find more
    than are wanted; those stay.
    """
    num_tiles = tl.cdiv(capacity, TILE)
    tile = tl.zeros((), tl.int32)
    found = tl.zeros((), tl.int32)
    reach = tl.full((), -1, tl.int32)
    while (found < wanted) & (tile < 2 * num_tiles):
        distance = tile % num_tiles * TILE + tl.arange(0, TILE)
        slot = hand + distance
        slot = tl.where(slot >= capacity, slot - capacity, slot)
        in_ring = distance < capacity
        bit = tl.load(referenced + slot, mask=in_ring, other=_NEEDED)
        is_clear = (bit == 0) & (slot < filled)
        token = tl.load(token_of + slot, mask=is_clear, other=-1)
        may_go = is_clear & (token >= below) & (token < from_)
        rank = found + tl.cumsum(may_go.to(tl.int32), axis=0) - 1
        taken = may_go & (rank < wanted)
        tl.store(victims + rank, slot, mask=taken)
        found += tl.sum(may_go.to(tl.int32), axis=0)
        furthest = tl.max(tl.where(taken, distance, -1), axis=0)
        reach = tl.maximum(reach, furthest)
        passed = (bit == 1) & ((found < wanted) | (distance <= furthest))
        # What is taken is a required slot from now on: the second round leaves it alone.
        new_bit = tl.where(taken, _NEEDED, 0).to(tl.uint8)
        tl.store(referenced + slot, new_bit, mask=taken | passed)
        tile += 1
        tl.debug_barrier()
    hand = hand + reach + 1
    return found, tl.where(hand >= capacity, hand - capacity, hand)


@triton.jit(
    do_not_specialize_on_alignment=["seats", "capacities", "protected_below", "protected_from", "required"],
)
def resolve_head(
    slot_of,
    token_of,
    referenced,
    hands,
    fills,
    seats,
    capacities,
    protected_below,
    protected_from,
    required,
    slots,
    missed,
    victims,
    num_heads,
    num_columns,
    slot_of_seat,
    slot_of_head,
    token_of_seat,
    token_of_head,
    referenced_seat,
    referenced_head,
    hands_seat,
    hands_head,
    fills_seat,
    fills_head,
    required_row,
    required_head,
    required_column,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, head = place // num_heads, place % num_heads
    seat = tl.load(seats + row)
    slot_of += seat * slot_of_seat + head * slot_of_head
    token_of += seat * token_of_seat + head * token_of_head
    referenced += seat * referenced_seat + head * referenced_head
    hands += seat * hands_seat + head * hands_head
    fills += seat * fills_seat + head * fills_head
    required += row * required_row + head * required_head
    slots += place * num_columns
    missed += place * num_columns
    victims += place * num_columns
    # On their way while positions are looked up.
    hand, filled = tl.load(hands), tl.load(fills)
    capacity = tl.load(capacities + row).to(tl.int32)
    below, from_ = tl.load(protected_below + row), tl.load(protected_from + row)

    total = tl.zeros((), tl.int32)
    for begin in range(0, num_columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = column < num_columns
        position = tl.load(required + column.to(tl.int64) * required_column, mask=inside, other=-1)
        slot = tl.load(slot_of + position, mask=position >= 0, other=-1)
        is_miss = (position >= 0) & (slot < 0)
        tl.store(slots + column, slot.to(tl.int64), mask=inside)
        tl.store(missed + column, is_miss.to(tl.uint8), mask=inside)
        total += tl.sum(is_miss.to(tl.int32), axis=0)
        # While nothing is to be evicted, the bit is set at once.
        bit = tl.where((total > 0) | (num_columns > COLUMNS), _NEEDED, 1)
        tl.store(referenced + slot, tl.zeros((COLUMNS,), tl.uint8) + bit.to(tl.uint8), mask=slot >= 0)

    if total > 0:
        # From here on threads read what others have written, or write what others have read: barriers between.
        tl.debug_barrier()
        num_free = tl.minimum(tl.maximum(capacity - filled, 0), total)
        num_found, new_hand = _evict(
            token_of, referenced, victims, hand, capacity, filled, below, from_, total - num_free, TILE
        )
        tl.debug_barrier()
        tl.store(hands, new_hand)
        tl.store(fills, filled + num_free)
        before = tl.zeros((), tl.int32)
        for begin in range(0, num_columns, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            is_miss = tl.load(missed + column, mask=column < num_columns, other=0) != 0
            rank = before + tl.cumsum(is_miss.to(tl.int32), axis=0) - 1
            before += tl.sum(is_miss.to(tl.int32), axis=0)
            is_placed = is_miss & (rank < num_free + num_found)
            evicts = is_placed & (rank >= num_free)
            victim = tl.load(victims + rank - num_free, mask=evicts, other=0)
            slot = tl.where(evicts, victim, filled + rank)
            position = tl.load(required + column.to(tl.int64) * required_column, mask=is_placed, other=0)
            # An evicted token is none of the required, so these stores never meet.
            evicted = tl.load(token_of + slot, mask=evicts, other=0)
            tl.debug_barrier()
            tl.store(slot_of + evicted, tl.full((COLUMNS,), -1, tl.int32), mask=evicts)
            tl.store(slot_of + position, slot, mask=is_placed)
            tl.store(token_of + slot, position.to(tl.int32), mask=is_placed)
            tl.store(slots + column, slot.to(tl.int64), mask=is_placed)
    if (total > 0) | (num_columns > COLUMNS):
        tl.debug_barrier()
        for begin in range(0, num_columns, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            slot = tl.load(slots + column, mask=column < num_columns, other=-1)
            tl.store(referenced + slot, tl.full((COLUMNS,), 1, tl.uint8), mask=slot >= 0)
