"""The definition of the hot cache's clock, in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Residency:
    """Which token lies in which slot, for one layer of every seat. All views are mutated in place.

    slot_of: int32 [seats, H_kv, N], slot of a position or -1. token_of: int32 [seats, H_kv, S], position in a slot
    or -1. referenced: bool [seats, H_kv, S], the clock's bits. hand: int64 [seats, H_kv].
    """

    slot_of: Tensor
    token_of: Tensor
    referenced: Tensor
    hand: Tensor


@dataclass(frozen=True, slots=True)
class SeatRows:
    """Whose slots are resolved: row b of a call's tensors is seat `seats[b]`. int64 [B] each, on the device.

    capacities: slots in use of each seat. protected_below, protected_from: see `resolve`. width: the largest capacity.
    """

    seats: Tensor
    capacities: Tensor
    protected_below: Tensor
    protected_from: Tensor
    width: int

    @classmethod
    def of(
        cls,
        seats: list[int],
        capacities: list[int],
        protected_below: list[int],
        protected_from: list[int],
        device: torch.device,
    ) -> SeatRows:
        rows = torch.tensor([seats, capacities, protected_below, protected_from], device=device)
        return cls(rows[0], rows[1], rows[2], rows[3], max(capacities))


@dataclass(frozen=True, slots=True)
class Misses:
    """Where misses lie in [B, H_kv, R]: one entry of row, head and column (int64 [n]) each; most: of one head."""

    row: Tensor
    head: Tensor
    column: Tensor
    most: int


def resolve(
    residency: Residency,
    seats: list[int],
    capacities: list[int],
    required: Tensor,
    protected_below: list[int],
    protected_from: list[int],
) -> tuple[Tensor, Tensor]:
    """Give every required position a slot and say which rows must be fetched into theirs.

    A miss takes, in this order, a free slot, one whose clock bit is clear, one whose bit is set; within a class
    the first from the clock's hand on. Positions below `protected_below` (sinks), from `protected_from` on (window)
    and those required now are never evicted. Bits that the hand passes are cleared; if the hand went round once in
    vain, all are. A slot that was required has its bit set.

    seats, capacities (slots in use of each seat), protected_*: one entry a row of `required`.
    required: int64 [B, H_kv, R], no position twice in a head, -1 pads. Returns (slots int64 [B, H_kv, R], -1 pads;
    missed bool [B, H_kv, R]). The caller guarantees room: capacity >= protected + required.

    Its halves are `lookup` and `claim`: whoever fetches learns of the misses between them, at the price of one
    synchronisation with the host; neither half has one of its own.
    """
    rows = SeatRows.of(seats, capacities, protected_below, protected_from, required.device)
    slots, missed = lookup(residency, rows, required)
    row, head, column = missed.nonzero(as_tuple=True)
    misses = Misses(row, head, column, most=int(missed.sum(dim=-1).max()))
    return claim(residency, rows, required, slots, missed, misses), missed


def lookup(residency: Residency, rows: SeatRows, required: Tensor) -> tuple[Tensor, Tensor]:
    """Slots of the required positions, -1 for misses and pads, and the misses; both [B, H_kv, R]. Changes nothing."""
    heads = torch.arange(required.shape[1], device=required.device)
    slots = residency.slot_of[rows.seats[:, None, None], heads[:, None], required.clamp(min=0)]
    is_position = required >= 0
    slots = slots.long().where(is_position, -1)
    return slots, is_position & (slots < 0)


def claim(
    residency: Residency,
    rows: SeatRows,
    required: Tensor,
    slots: Tensor,
    missed: Tensor,
    misses: Misses | None,
) -> Tensor:
    """Slots with those that the misses took: `slots` and `missed` are `lookup`'s, `misses` says where (None: none)."""
    # Pads write to a column of their own.
    needed = torch.zeros(*slots.shape[:2], rows.width + 1, dtype=torch.bool, device=slots.device)
    needed = needed.scatter_(2, slots.where(slots >= 0, rows.width), True)[..., : rows.width]
    referenced = residency.referenced[rows.seats, :, : rows.width]
    if misses is not None and misses.most:
        token_of = residency.token_of[rows.seats, :, : rows.width]
        victims, passed = _victims(residency, rows, token_of, referenced, needed, missed, misses.most)
        rank = missed.cumsum(dim=-1) - 1
        slots = torch.where(missed, victims.gather(-1, rank.clamp(min=0, max=misses.most - 1)), slots)
        row, head = misses.row, misses.head
        seat, position = rows.seats[row], required[row, head, misses.column]
        slot = slots[row, head, misses.column]
        evicted = token_of[row, head, slot]
        # Who took a free slot evicts nothing: what it clears instead is its own entry, which is written next.
        residency.slot_of[seat, head, torch.where(evicted >= 0, evicted, position)] = -1
        residency.slot_of[seat, head, position] = slot.to(residency.slot_of.dtype)
        residency.token_of[seat, head, slot] = position.to(residency.token_of.dtype)
        needed[row, head, slot] = True
        referenced &= ~passed
    residency.referenced[rows.seats, :, : rows.width] = referenced | needed
    return slots


def _victims(
    residency: Residency,
    rows: SeatRows,
    token_of: Tensor,
    referenced: Tensor,
    needed: Tensor,
    missed: Tensor,
    most: int,
) -> tuple[Tensor, Tensor]:
    """Slots to reuse, in the order of taking: int64 [B, H_kv, most]; and those the hand passed. Moves the hand."""
    capacity = rows.capacities[:, None, None]
    hand = residency.hand[rows.seats]
    places = torch.arange(rows.width, device=token_of.device)
    distance = (places - hand[..., None]) % capacity
    free = token_of < 0
    below, from_ = rows.protected_below[:, None, None], rows.protected_from[:, None, None]
    kept = needed | (places >= capacity) | (~free & ((token_of < below) | (token_of >= from_)))
    rank = torch.where(free, 0, torch.where(referenced, 2, 1))
    key = torch.where(kept, 3 * capacity, rank * capacity + distance)
    ordered, victims = key.topk(most, dim=-1, largest=False, sorted=True)
    used = torch.arange(most, device=key.device) < missed.sum(dim=-1, keepdim=True)
    reach = torch.where(used, ordered % capacity, -1).amax(dim=-1)
    wrapped = (used & (ordered >= 2 * capacity)).any(dim=-1)
    residency.hand[rows.seats] = (hand + reach + 1) % rows.capacities[:, None]
    return victims, (distance <= reach[..., None]) | wrapped[..., None]
