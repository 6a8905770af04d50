"""The definition of the hot cache's clock, in PyTorch; a CPU serves with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# What a bit is set to while a call runs, where the slot is required: it is not evicted.
NEEDED = 2
# Slots of the ring that are inspected first, in addition to four for each that is wanted; then WIDER times as many.
SPAN = 64
WIDER = 16


@dataclass(frozen=True, slots=True)
class Residency:
    """Which token lies in which slot, for every seat and head. All are mutated in place, and all may be views.

    slot_of: int32 [seats, H, N], slot of a position or -1. token_of: int32 [seats, H, S], position in a slot; of a
    free one, anything. referenced: uint8 [seats, H, S], the clock's bits, 0 or 1. hand: int32 [seats, H], a slot.
    filled: int32 [seats, H], slots [0, filled) hold tokens, those from there up to the seat's capacity are free. H are
    the KV heads of one layer, or those of many layers.
    """

    slot_of: Tensor
    token_of: Tensor
    referenced: Tensor
    hand: Tensor
    filled: Tensor

    @property
    def device(self) -> torch.device:
        return self.slot_of.device


@dataclass(frozen=True, slots=True)
class SeatLanes:
    """The seats whose slots are resolved: lane b of a call's tensors is seat `seats[b]`. int64 [B] each, on the device.

    capacities: slots in use of each seat. protected_below, protected_from: see `resolve`.
    """

    seats: Tensor
    capacities: Tensor
    protected_below: Tensor
    protected_from: Tensor


def resolve(residency: Residency, rows: SeatLanes, required: Tensor) -> tuple[Tensor, Tensor]:
    """Give every required position a slot and say which positions must be fetched into theirs.

    Misses take slots in the order of their columns: free ones first, ascending; then from the clock's hand on those
    whose bit is clear; then from the hand on those whose bit is set. Tokens at positions below `protected_below`
    (sinks), from `protected_from` on (window) and those required now are never evicted. The hand moves behind the
    furthest evicted slot, and bits that it passes are cleared; where the clear ones did not suffice, all are. Free
    slots do not move it. In the end the bit of every required slot is set.

    required: int64 [B, H, R], no position twice in a head, -1 pads anywhere. Returns (slots int64 [B, H, R], -1 pads;
    missed bool [B, H, R]). A miss for which there is no slot keeps -1. No seat may be in two lanes, unless these
    require only padding, which changes nothing.
    """
    seats, heads = rows.seats[:, None, None], torch.arange(required.shape[1], device=required.device)[:, None]
    is_position = required >= 0
    slots = residency.slot_of[seats, heads, required.clamp(min=0)].long().where(is_position, -1)
    missed = is_position & (slots < 0)
    if missed.any():
        _set_bits(residency, seats, heads, slots, NEEDED)
        slots = _take(residency, rows, required, slots, missed)
    _set_bits(residency, seats, heads, slots, 1)
    return slots, missed


def _set_bits(residency: Residency, seats: Tensor, heads: Tensor, slots: Tensor, bit: int) -> None:
    has_slot = slots >= 0
    if not has_slot.all():
        seats, heads, slots = (index.expand_as(slots)[has_slot] for index in (seats, heads, slots))
    residency.referenced[seats, heads, slots] = bit


def _take(residency: Residency, rows: SeatLanes, required: Tensor, slots: Tensor, missed: Tensor) -> Tensor:
    """`slots`, with those that the misses take: the state holds them, but for the bits of required slots."""
    filled, wanted = residency.filled[rows.seats].long(), missed.sum(dim=-1)
    num_free = torch.minimum(wanted, (rows.capacities[:, None] - filled).clamp(min=0))
    rank = torch.arange(int(wanted.max()), device=slots.device)
    # Whose turn is when: [B, H, most misses of a head].
    turns = (filled[..., None] + rank).where(rank < num_free[..., None], -1)
    _evict(residency, rows, filled, num_free, wanted - num_free, turns)
    turn = (missed.cumsum(dim=-1) - 1).clamp(min=0)
    slots = slots.where(~missed, turns.gather(-1, turn))

    placed = missed & (slots >= 0)
    row, head, _ = placed.nonzero(as_tuple=True)
    seat, slot, position = rows.seats[row], slots[placed], required[placed]
    is_evicted = slot < filled[row, head]
    evicted = residency.token_of[seat, head, slot][is_evicted].long()
    residency.slot_of[seat[is_evicted], head[is_evicted], evicted] = -1
    residency.slot_of[seat, head, position] = slot.int()
    residency.token_of[seat, head, slot] = position.int()
    row, head = num_free.nonzero(as_tuple=True)
    residency.filled[rows.seats[row], head] = (filled + num_free)[row, head].int()
    return slots


class _Rings(NamedTuple):
    """Heads that evict: int64 [n, 1] each. first: the first turn that is the ring's; wanted: how many are."""

    row: Tensor
    head: Tensor
    seat: Tensor
    capacity: Tensor
    below: Tensor
    from_: Tensor
    filled: Tensor
    first: Tensor
    wanted: Tensor
    hand: Tensor


def _evict(
    residency: Residency, rows: SeatLanes, filled: Tensor, num_free: Tensor, wanted: Tensor, turns: Tensor
) -> None:
    """Write the evicted slots into `turns`, move the hands and clear the bits that they pass."""
    row, head = wanted.nonzero(as_tuple=True)
    of_seat = (rows.seats, rows.capacities, rows.protected_below, rows.protected_from)
    seat, capacity, below, from_ = (field[row] for field in of_seat)
    of_head = (field[row, head] for field in (filled, num_free, wanted))
    hand = residency.hand[seat, head].long()
    columns = (row, head, seat, capacity, below, from_, *of_head, hand)
    rings = _Rings(*(column[:, None] for column in columns))
    span = SPAN + 4 * turns.shape[-1]
    while rings.row.numel():
        width = int(rings.capacity.max())
        in_vain = _sweep(residency, rings, turns, min(span, width), is_whole=span >= width)
        rings = _Rings(*(column[in_vain] for column in rings))
        span *= WIDER


def _sweep(residency: Residency, rings: _Rings, turns: Tensor, span: int, is_whole: bool) -> Tensor:
    """Evict within `span` slots from the hand on. Returns the heads whose clear slots there do not suffice: bool [n].

    Nothing is done for those, unless the span is the whole ring; then none is returned.
    """
    distance = torch.arange(span, device=turns.device)
    slot = (rings.hand + distance) % rings.capacity
    in_ring = distance < rings.capacity
    token = residency.token_of[rings.seat, rings.head, slot]
    bit = residency.referenced[rings.seat, rings.head, slot]
    may_go = in_ring & (slot < rings.filled) & (token >= rings.below) & (token < rings.from_)
    is_clear, is_set = may_go & (bit == 0), may_go & (bit == 1)
    num_clear = is_clear.sum(dim=-1, keepdim=True)
    in_vain = num_clear < rings.wanted
    is_done = ~in_vain | is_whole
    rank = torch.where(is_clear, is_clear.cumsum(-1), num_clear + is_set.cumsum(-1)) - 1
    taken = is_done & (is_clear | is_set) & (rank < rings.wanted)
    ring, _ = taken.nonzero(as_tuple=True)
    turn = (rings.first + rank)[taken]
    turns[rings.row[ring, 0], rings.head[ring, 0], turn] = slot[taken]

    reach = distance.where(taken, -1).amax(dim=-1, keepdim=True)
    cleared = is_done & in_ring & ((distance <= reach) | in_vain)
    ring, _ = cleared.nonzero(as_tuple=True)
    residency.referenced[rings.seat[ring, 0], rings.head[ring, 0], slot[cleared]] = 0
    hand = (rings.hand + reach + 1) % rings.capacity
    residency.hand[rings.seat, rings.head] = hand.int()
    return (~is_done)[:, 0]
