"""The hot cache's clock against a plain-Python clock written from its description."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from gpu_worker.kernels.resolve import Residency, SeatLanes, reference, resolve

NUM_SEATS, NUM_HEADS, NUM_POSITIONS, NUM_SLOTS = 3, 2, 90, 40
# Where nothing may be read.
GARBAGE = 7777


@dataclass
class ClockModel:
    """One head of one seat: a dict each way, a set of bits, a hand, and how many slots are filled."""

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

        free = list(range(len(self.token_of), self.capacity))[: sum(missing)]
        num_wanted = sum(missing) - len(free)
        clear = [slot for slot in ring if evictable(slot) and slot not in self.referenced]
        marked = [slot for slot in ring if evictable(slot) and slot in self.referenced]
        victims = (clear + marked)[:num_wanted]
        if num_wanted:
            farthest = max((ring.index(slot) for slot in victims), default=-1)
            in_vain = len(clear) < num_wanted
            self.referenced -= set(ring if in_vain else ring[: farthest + 1])
            self.hand = (self.hand + farthest + 1) % self.capacity
        missed = [token for token, is_missing in zip(required, missing, strict=True) if is_missing]
        # There may not be room for all.
        for token, slot in zip(missed, free + victims, strict=False):
            if slot in self.token_of:
                del self.slot_of[self.token_of[slot]]
            self.token_of[slot], self.slot_of[token] = token, slot
        slots = [self.slot_of.get(token, -1) for token in required]
        self.referenced |= {slot for slot in slots if slot >= 0}
        return slots, missing


def empty_residency() -> Residency:
    return Residency(
        slot_of=torch.full((NUM_SEATS, NUM_HEADS, NUM_POSITIONS), -1, dtype=torch.int32),
        token_of=torch.full((NUM_SEATS, NUM_HEADS, NUM_SLOTS), GARBAGE, dtype=torch.int32),
        referenced=torch.ones(NUM_SEATS, NUM_HEADS, NUM_SLOTS, dtype=torch.uint8),
        hand=torch.zeros(NUM_SEATS, NUM_HEADS, dtype=torch.int32),
        filled=torch.zeros(NUM_SEATS, NUM_HEADS, dtype=torch.int32),
    )


def rows_of(seats: list[int], capacities: list[int], below: list[int], from_: list[int]) -> SeatLanes:
    return SeatLanes(*torch.tensor([seats, capacities, below, from_]))


def check_state(residency: Residency, models: dict[tuple[int, int], ClockModel]) -> None:
    for (seat, head), model in models.items():
        filled = int(residency.filled[seat, head])
        slot_of, token_of = residency.slot_of[seat, head].tolist(), residency.token_of[seat, head].tolist()
        assert {token: slot for token, slot in enumerate(slot_of) if slot >= 0} == model.slot_of
        assert dict(enumerate(token_of[:filled])) == model.token_of
        assert token_of[filled:] == [GARBAGE] * (NUM_SLOTS - filled)
        # One is the other's inverse, so no slot holds two tokens and no token lies twice.
        assert {token: slot for slot, token in model.token_of.items()} == model.slot_of
        bits = residency.referenced[seat, head].tolist()
        assert bits[:filled] == [int(slot in model.referenced) for slot in range(filled)]
        assert int(residency.hand[seat, head]) == model.hand


def random_required(source: random.Random, num_tokens: int, width: int) -> list[int]:
    """Positions of any kind in any order with pads between, now and then more than there is room for."""
    count = min(source.randrange(0, width + 1), num_tokens)
    chosen = source.sample(range(num_tokens), count) + [-1] * (width - count)
    source.shuffle(chosen)
    return chosen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("span", [-3, 64])
def test_random_steps_leave_the_state_of_the_plain_clock(
    monkeypatch: pytest.MonkeyPatch, seed: int, span: int
) -> None:
    # With spans of a few slots, some rings have to look further and some have not.
    monkeypatch.setattr(reference, "SPAN", span)
    monkeypatch.setattr(reference, "WIDER", 2)
    source = random.Random(seed)
    residency = empty_residency()
    capacities = [source.randrange(14, NUM_SLOTS + 1) for _ in range(NUM_SEATS)]
    models = {
        (seat, head): ClockModel(capacities[seat]) for seat in range(NUM_SEATS) for head in range(NUM_HEADS)
    }
    num_tokens = [source.randrange(8, 12) for _ in range(NUM_SEATS)]
    num_sinks = [source.randrange(1, 4) for _ in range(NUM_SEATS)]
    for _ in range(100):
        seats = source.sample(range(NUM_SEATS), source.randrange(1, NUM_SEATS + 1))
        width = source.choice([0, 1, 3, 8, 16])
        below = [num_sinks[seat] for seat in seats]
        windows = [max(num_sinks[seat], num_tokens[seat] - 3) for seat in seats]
        required = torch.tensor(
            [[random_required(source, num_tokens[seat], width) for _ in range(NUM_HEADS)] for seat in seats]
        ).view(len(seats), NUM_HEADS, width)
        before = {key: dict(model.slot_of) for key, model in models.items()}
        rows = rows_of(seats, [capacities[seat] for seat in seats], below, windows)
        slots, missed = resolve(residency, rows, required.long())
        for row, seat in enumerate(seats):
            for head in range(NUM_HEADS):
                model = models[seat, head]
                expected = model.resolve(required[row, head].tolist(), below[row], windows[row])
                assert (slots[row, head].tolist(), missed[row, head].tolist()) == expected
                for token, slot in before[seat, head].items():
                    if token < below[row] or token >= windows[row]:
                        assert model.slot_of[token] == slot
        check_state(residency, models)
        for seat in seats:
            num_tokens[seat] = min(NUM_POSITIONS, num_tokens[seat] + source.randrange(0, 2))


def test_seats_that_are_not_asked_for_stay_as_they_are() -> None:
    residency = empty_residency()
    untouched = empty_residency()
    # Rows of padding may share a seat, with each other and with a row that asks.
    required = torch.arange(6).expand(4, NUM_HEADS, 6).clone()
    required[[0, 2, 3]] = -1
    resolve(residency, rows_of([2, 1, 1, 2], [10, 10, 3, 1], [0] * 4, [90, 90, 0, 0]), required)
    assert residency.filled[1].tolist() == [6, 6]
    assert residency.slot_of[1, :, :6].tolist() == [list(range(6))] * 2
    for seat in (0, 2):
        for name in ("slot_of", "token_of", "referenced", "hand", "filled"):
            assert torch.equal(getattr(residency, name)[seat], getattr(untouched, name)[seat])


def test_a_token_just_used_outlives_those_that_were_not() -> None:
    residency = empty_residency()

    def use(*tokens: int) -> list[bool]:
        required = torch.tensor(tokens).expand(1, NUM_HEADS, len(tokens))
        return resolve(residency, rows_of([0], [4], [0], [90]), required)[1][0, 0].tolist()

    assert use(10, 11, 12, 13) == [True] * 4
    # All bits are set: the hand goes round in vain and clears them.
    assert use(14) == [True]
    assert use(12) == [False]
    assert use(15) == [True]
    assert use(12) == [False]
    assert use(14) == [False]


def test_without_room_a_miss_keeps_no_slot() -> None:
    residency = empty_residency()
    resolve(residency, rows_of([0], [4], [0], [90]), torch.arange(4).expand(1, NUM_HEADS, 4))
    # 0 is a sink, 3 is in the window and 2 is required.
    required = torch.tensor([20, 2, 21, 22]).expand(1, NUM_HEADS, 4)
    slots, missed = resolve(residency, rows_of([0], [4], [1], [3]), required)
    assert slots[0].tolist() == [[1, 2, -1, -1]] * 2
    assert missed[0].tolist() == [[True, False, True, True]] * 2
    assert residency.token_of[0, :, :4].tolist() == [[0, 20, 2, 3]] * 2


def test_nothing_required_changes_nothing() -> None:
    residency = empty_residency()
    resolve(residency, rows_of([0], [8], [1], [4]), torch.arange(5).expand(1, NUM_HEADS, 5))
    before = [tensor.clone() for tensor in (residency.slot_of, residency.token_of, residency.referenced)]
    slots, missed = resolve(residency, rows_of([0], [8], [1], [4]), torch.full((1, NUM_HEADS, 3), -1))
    assert (slots == -1).all()
    assert not missed.any()
    empty = torch.empty((1, NUM_HEADS, 0), dtype=torch.int64)
    slots, missed = resolve(residency, rows_of([0], [8], [1], [4]), empty)
    assert slots.shape == missed.shape == (1, NUM_HEADS, 0)
    after = residency.slot_of, residency.token_of, residency.referenced
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)


def test_one_column_places_a_token_in_the_heads_of_all_layers() -> None:
    num_layers = 3
    state = empty_residency()
    views = (state.slot_of, state.token_of, state.referenced, state.hand, state.filled)
    # [seats, L, H, ...], of which layers 1 and 2 are folded into heads.
    layered = [view[:, None].repeat(1, num_layers, *[1] * (view.dim() - 1)) for view in views]
    folded = Residency(*(view[:, 1:].flatten(1, 2) for view in layered))
    num_folded = 2 * NUM_HEADS
    for position in range(8):
        rows = rows_of([2, 0], [5, 3], [1, 1], [max(1, position - 1)] * 2)
        required = torch.tensor([position, position])[:, None, None].expand(-1, num_folded, 1)
        slots, missed = resolve(folded, rows, required)
        assert missed.all()
        # Slot 0 keeps its sink, the others go round.
        expected = [position if position < size else 1 + (position - size) % (size - 1) for size in (5, 3)]
        assert slots.tolist() == [[[slot]] * num_folded for slot in expected]
    assert layered[4][:, 0].eq(0).all()
    assert layered[4][2, 1:].eq(5).all()
    assert layered[1][0, 1:, :, :3].eq(torch.tensor([0, 7, 6])).all()
