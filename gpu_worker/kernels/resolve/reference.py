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
    """
    slots = torch.full_like(required, -1)
    missed = torch.zeros_like(required, dtype=torch.bool)
    for row, (seat, capacity) in enumerate(zip(seats, capacities, strict=True)):
        slots[row], missed[row] = _resolve_seat(
            residency.slot_of[seat],
            residency.token_of[seat, :, :capacity],
            residency.referenced[seat, :, :capacity],
            residency.hand[seat],
            required[row],
            protected_below[row],
            protected_from[row],
        )
    return slots, missed


def _resolve_seat(
    slot_of: Tensor,
    token_of: Tensor,
    referenced: Tensor,
    hand: Tensor,
    required: Tensor,
    protected_below: int,
    protected_from: int,
) -> tuple[Tensor, Tensor]:
    valid = required >= 0
    slots = slot_of.gather(1, required.clamp(min=0)).long().masked_fill(~valid, -1)
    missed = valid & (slots < 0)
    num_missed = missed.sum(dim=1)
    # Bool scatter through a padded column: -1 pads write there.
    needed = torch.zeros(token_of.shape[0], token_of.shape[1] + 1, dtype=torch.bool, device=token_of.device)
    needed.scatter_(1, slots.where(slots >= 0, slots.new_tensor(token_of.shape[1])), True)
    needed = needed[:, :-1]
    most = int(num_missed.max())
    if most:
        victims = _victims(
            token_of, referenced, hand, needed, num_missed, most, protected_below, protected_from
        )
        rank = missed.cumsum(dim=1) - 1
        taken = victims.gather(1, rank.clamp(min=0, max=most - 1))
        slots = torch.where(missed, taken, slots)
        heads, columns = missed.nonzero(as_tuple=True)
        placed, positions = slots[heads, columns], required[heads, columns]
        evicted = token_of[heads, placed]
        held = evicted >= 0
        slot_of[heads[held], evicted[held].long()] = -1
        token_of[heads, placed] = positions.to(token_of.dtype)
        slot_of[heads, positions] = placed.to(slot_of.dtype)
        referenced[heads, placed] = True
    referenced |= needed
    return slots, missed


def _victims(
    token_of: Tensor,
    referenced: Tensor,
    hand: Tensor,
    needed: Tensor,
    num_missed: Tensor,
    most: int,
    protected_below: int,
    protected_from: int,
) -> Tensor:
    """Slots to reuse, in the order of taking: int64 [H_kv, most]. Moves the hand and clears the bits it passes."""
    capacity = token_of.shape[1]
    distance = (torch.arange(capacity, device=token_of.device) - hand[:, None]) % capacity
    free = token_of < 0
    kept = needed | (~free & ((token_of < protected_below) | (token_of >= protected_from)))
    rank = torch.where(free, 0, torch.where(referenced, 2, 1))
    key = (rank * capacity + distance).masked_fill(kept, 3 * capacity)
    ordered, victims = key.topk(most, dim=1, largest=False, sorted=True)
    used = torch.arange(most, device=key.device) < num_missed[:, None]
    reach = ((ordered % capacity).masked_fill(~used, -1)).amax(dim=1)
    wrapped = (used & (ordered >= 2 * capacity)).any(dim=1)
    passed = (distance <= reach[:, None]) | wrapped[:, None]
    referenced &= ~passed
    hand.copy_((hand + reach + 1) % capacity)
    return victims
