"""The hot cache's clock against a plain-Python clock written from its description."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from gpu_worker.kernels.resolve import Residency, resolve

NUM_SEATS, NUM_HEADS, NUM_POSITIONS, NUM_SLOTS = 3, 2, 90, 40


@dataclass
class ClockModel:
    """One head of one seat: a dict each way, a set of bits and a hand."""

    capacity: int
    slot_of: dict[int, int] = field(default_factory=dict)
    token_of: dict[int, int] = field(default_factory=dict)
    referenced: set[int] = field(default_factory=set)
    hand: int = 0

    def resolve(self, required: list[int], below: int, from_: int) -> tuple[list[int], list[bool]]:
        missing = [token >= 0 and token not in self.slot_of for token in required]
        hits = {self.slot_of[token] for token in required if token in self.slot_of}
        ring = [(self.hand + step) % self.capacity for step in range(self.capacity)]

        def evictable(slot: int) -> bool:
            return slot in self.token_of and slot not in hits and below <= self.token_of[slot] < from_

        free = [slot for slot in ring if slot not in self.token_of]
        clear = [slot for slot in ring if evictable(slot) and slot not in self.referenced]
        marked = [slot for slot in ring if evictable(slot) and slot in self.referenced]
        victims = (free + clear + marked)[: sum(missing)]
        if victims:
            farthest = max(ring.index(slot) for slot in victims)
            in_vain = any(slot in marked for slot in victims)
            self.referenced -= set(ring if in_vain else ring[: farthest + 1])
            self.hand = (self.hand + farthest + 1) % self.capacity
        for token, slot in zip(
            (t for t, m in zip(required, missing, strict=True) if m), victims, strict=True
        ):
            if slot in self.token_of:
                del self.slot_of[self.token_of[slot]]
            self.token_of[slot], self.slot_of[token] = token, slot
        slots = [self.slot_of[token] if token >= 0 else -1 for token in required]
        self.referenced |= {slot for slot in slots if slot >= 0}
        return slots, missing


def empty_residency() -> Residency:
    return Residency(
        slot_of=torch.full((NUM_SEATS, NUM_HEADS, NUM_POSITIONS), -1, dtype=torch.int32),
        token_of=torch.full((NUM_SEATS, NUM_HEADS, NUM_SLOTS), -1, dtype=torch.int32),
        referenced=torch.zeros(NUM_SEATS, NUM_HEADS, NUM_SLOTS, dtype=torch.bool),
        hand=torch.zeros(NUM_SEATS, NUM_HEADS, dtype=torch.int64),
    )


def check_state(residency: Residency, models: dict[tuple[int, int], ClockModel]) -> None:
    for (seat, head), model in models.items():
        slot_of, token_of = residency.slot_of[seat, head].tolist(), residency.token_of[seat, head].tolist()
        assert {token: slot for token, slot in enumerate(slot_of) if slot >= 0} == model.slot_of
        assert {slot: token for slot, token in enumerate(token_of) if token >= 0} == model.token_of
        # One is the other's inverse, so no slot holds two tokens and no token lies twice.
        assert {token: slot for slot, token in model.token_of.items()} == model.slot_of
        assert set(residency.referenced[seat, head].nonzero().flatten().tolist()) == model.referenced
        assert int(residency.hand[seat, head]) == model.hand


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_leave_the_state_of_the_plain_clock(seed: int) -> None:
    source = random.Random(seed)
    residency = empty_residency()
    capacities = [source.randrange(14, NUM_SLOTS + 1) for _ in range(NUM_SEATS)]
    models = {
        (seat, head): ClockModel(capacities[seat]) for seat in range(NUM_SEATS) for head in range(NUM_HEADS)
    }
    num_tokens = [source.randrange(8, 12) for _ in range(NUM_SEATS)]
    num_sinks = [source.randrange(1, 4) for _ in range(NUM_SEATS)]
    for _ in range(70):
        seats = source.sample(range(NUM_SEATS), source.randrange(1, NUM_SEATS + 1))
        width = source.randrange(0, 8)
        below = [num_sinks[seat] for seat in seats]
        windows = [max(num_sinks[seat], num_tokens[seat] - 3) for seat in seats]
        required = torch.full((len(seats), NUM_HEADS, width), -1)
        for row, seat in enumerate(seats):
            for head in range(NUM_HEADS):
                held = models[seat, head].slot_of
                kept = [token for token in held if token < below[row] or token >= windows[row]]
                # Now and then sinks and window too; never more than there is room for.
                room = capacities[seat] - len(kept)
                pool = [t for t in range(num_tokens[seat]) if t in kept or below[row] <= t < windows[row]]
                pool += [t for t in range(num_tokens[seat]) if t not in pool]
                count = min(source.randrange(0, width + 1), room, len(pool))
                chosen = source.sample(pool, count) + [-1] * (width - count)
                source.shuffle(chosen)
                required[row, head] = torch.tensor(chosen, dtype=torch.int64)
        before = {key: dict(model.slot_of) for key, model in models.items()}
        slots, missed = resolve(
            residency, seats, [capacities[seat] for seat in seats], required, below, windows
        )
        for row, seat in enumerate(seats):
            for head in range(NUM_HEADS):
                model = models[seat, head]
                expected = model.resolve(required[row, head].tolist(), below[row], windows[row])
                assert (slots[row, head].tolist(), missed[row, head].tolist()) == expected
                for token, slot in before[seat, head].items():
                    if token < below[row] or token >= windows[row]:
                        assert model.slot_of[token] == slot
                for token in required[row, head].tolist():
                    assert token < 0 or model.token_of[int(residency.slot_of[seat, head, token])] == token
        check_state(residency, models)
        for seat in seats:
            num_tokens[seat] = min(NUM_POSITIONS, num_tokens[seat] + source.randrange(0, 2))


def test_seats_that_are_not_asked_for_stay_as_they_are() -> None:
    residency = empty_residency()
    resolve(residency, [1], [10], torch.arange(6).expand(1, NUM_HEADS, 6), [0], [90])
    for seat in (0, 2):
        assert (residency.slot_of[seat] == -1).all()
        assert (residency.token_of[seat] == -1).all()
        assert not residency.referenced[seat].any()


def test_a_token_just_used_outlives_those_that_were_not() -> None:
    residency = empty_residency()

    def use(*tokens: int) -> list[bool]:
        required = torch.tensor(tokens).expand(1, NUM_HEADS, len(tokens))
        return resolve(residency, [0], [4], required, [0], [90])[1][0, 0].tolist()

    assert use(10, 11, 12, 13) == [True] * 4
    # All bits are set: the hand goes round in vain and clears them.
    assert use(14) == [True]
    assert use(12) == [False]
    assert use(15) == [True]
    assert use(12) == [False]
    assert use(14) == [False]


def test_nothing_required_changes_nothing() -> None:
    residency = empty_residency()
    resolve(residency, [0], [8], torch.arange(5).expand(1, NUM_HEADS, 5), [1], [4])
    before = [tensor.clone() for tensor in (residency.slot_of, residency.token_of, residency.hand)]
    slots, missed = resolve(residency, [0], [8], torch.full((1, NUM_HEADS, 3), -1), [1], [4])
    assert (slots == -1).all()
    assert not missed.any()
    slots, missed = resolve(residency, [0], [8], torch.empty((1, NUM_HEADS, 0), dtype=torch.int64), [1], [4])
    assert slots.shape == missed.shape == (1, NUM_HEADS, 0)
    for old, new in zip(before, (residency.slot_of, residency.token_of, residency.hand), strict=True):
        assert torch.equal(old, new)
