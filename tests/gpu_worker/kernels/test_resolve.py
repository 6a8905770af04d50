"""The hot cache's clock: the kernel against the reference, and that against a plain-Python clock written from its
description; the complete state after every step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.resolve import Residency, SeatLanes, reference

kernel = pytest.importorskip("gpu_worker.kernels.resolve.kernel")

NUM_LAYERS, LAYER = 3, 1
# What a free slot says that it holds: a token that would be evicted from it.
STALE_TOKEN = 5
NAMES = [each.name for each in fields(Residency)]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 16 slots and of 8 columns, so that small states span many."""
    monkeypatch.setattr(kernel, "TILE", 16)
    monkeypatch.setattr(kernel, "COLUMNS", 8)


def state_of(num_seats: int, num_heads: int, num_positions: int, num_slots: int) -> Residency:
    """Layers of a state in which nothing is resident; where no call may look, it says otherwise."""
    shape = (num_seats, NUM_LAYERS, num_heads)
    return Residency(
        slot_of=torch.full((*shape, num_positions), -1, dtype=torch.int32),
        token_of=torch.full((*shape, num_slots), STALE_TOKEN, dtype=torch.int32),
        referenced=(torch.arange(num_slots) % 3 == 0).byte().repeat(*shape, 1),
        hand=torch.zeros(shape, dtype=torch.int32),
        filled=torch.zeros(shape, dtype=torch.int32),
    )


def at_layer(state: Residency) -> Residency:
    """One layer, so that no view is contiguous."""
    return Residency(*(getattr(state, name)[:, LAYER] for name in NAMES))


def copy_of(state: Residency, device: torch.device) -> Residency:
    return Residency(*(getattr(state, name).clone().to(device) for name in NAMES))


def fill(state: Residency, seat: int, head: int, tokens: Tensor, bits: Tensor, hand: int) -> None:
    """Slot i of one head holds the token tokens[i]."""
    count = tokens.shape[0]
    state.token_of[seat, LAYER, head, :count] = tokens.int()
    state.slot_of[seat, LAYER, head, tokens] = torch.arange(count).int()
    state.referenced[seat, LAYER, head, :count] = bits.byte()
    state.hand[seat, LAYER, head] = hand
    state.filled[seat, LAYER, head] = count


def run(
    mine: Residency,
    theirs: Residency,
    seats: list[int],
    capacities: list[int],
    required: Tensor,
    below: list[int],
    from_: list[int],
) -> tuple[Tensor, Tensor]:
    """Slots and misses of one step of both, which are the same, as is what they leave."""
    device = mine.device
    rows = [seats, [capacities[seat] for seat in seats], below, from_]
    expected = reference.resolve(at_layer(theirs), SeatLanes(*torch.tensor(rows)), required)
    # A transposed copy: neither the last stride nor any other is the usual one.
    strided = required.transpose(0, 2).contiguous().transpose(0, 2).to(device)
    found = kernel.resolve(at_layer(mine), SeatLanes(*torch.tensor(rows, device=device)), strided)
    for of_kernel, of_reference in zip(found, expected, strict=True):
        assert of_kernel.dtype == of_reference.dtype
        assert torch.equal(of_kernel.cpu(), of_reference)
    assert_same(mine, theirs)
    return expected


def assert_same(mine: Residency, theirs: Residency) -> None:
    """Other layers, and what lies beyond the slots in use, are compared too."""
    for name in NAMES:
        assert torch.equal(getattr(mine, name).cpu(), getattr(theirs, name)), name


@dataclass(frozen=True)
class Step:
    """The arguments of one call."""

    seats: list[int]
    required: Tensor
    below: list[int]
    from_: list[int]


def random_steps(source: random.Random, num_steps: int) -> Iterator[Step]:
    """Steps of three growing sequences of two heads; rows of padding stand on a seat that is left."""
    num_tokens, num_sinks = [30, 12, 50], [source.randrange(0, 4) for _ in range(3)]
    for _ in range(num_steps):
        seats = source.sample(range(3), source.randrange(1, 4))
        pads = [next(iter({0, 1, 2} - set(seats)))] * source.randrange(0, 2) if len(seats) < 3 else []
        width = source.choice([0, 1, 7, 8, 9, 16, 27])
        required = torch.full((len(seats) + len(pads), 2, width), -1)
        for row, seat in enumerate(seats):
            for head in range(2):
                # Near the last ones now and then: hits; sometimes more than there is room for; and only pads.
                count = min(source.randrange(0, width + 1), num_tokens[seat])
                span = source.choice([num_tokens[seat], min(num_tokens[seat], count + 4)])
                chosen = source.sample(range(num_tokens[seat] - span, num_tokens[seat]), count)
                chosen += [-1] * (width - count)
                source.shuffle(chosen)
                required[row, head] = torch.tensor(chosen)
        below = [num_sinks[seat] for seat in seats] + [0] * len(pads)
        from_ = [max(num_sinks[seat], num_tokens[seat] - 3) for seat in seats] + [0] * len(pads)
        yield Step(seats + pads, required, below, from_)
        for seat in seats:
            num_tokens[seat] = min(220, num_tokens[seat] + source.randrange(0, 9))


CAPACITIES = [[63, 17, 40], [64, 65, 16], [31, 90, 33], [15, 14, 100]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("small_tiles")
def test_random_steps_of_the_kernel(device: torch.device, seed: int) -> None:
    theirs, capacities = state_of(3, 2, 220, 105), CAPACITIES[seed]
    mine = copy_of(theirs, device)
    seen: set[str] = set()
    for step in random_steps(random.Random(seed), 14):
        old = copy_of(theirs, torch.device("cpu"))
        _, missed = run(mine, theirs, step.seats, capacities, step.required, step.below, step.from_)
        for row, seat in enumerate(step.seats):
            moved = old.hand[seat, LAYER] != theirs.hand[seat, LAYER]
            grown = old.filled[seat, LAYER] < theirs.filled[seat, LAYER]
            # After a hand that went round in vain, only what was required just now has its bit set.
            bits = theirs.referenced[seat, LAYER, :, : capacities[seat]].sum(dim=-1)
            in_vain = moved & (bits == (step.required[row] >= 0).sum(dim=-1))
            hit = (step.required[row] >= 0) & ~missed[row]
            kinds = {"moved": moved, "grown": grown, "both": moved & grown, "in vain": in_vain, "hit": hit}
            seen |= {kind for kind, happened in kinds.items() if happened.any()}
    assert seen == {"moved", "grown", "both", "in vain", "hit"}


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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("span", [-3, 64])
def test_random_steps_leave_the_state_of_the_plain_clock(
    monkeypatch: pytest.MonkeyPatch, seed: int, span: int
) -> None:
    # With spans of a few slots, some rings have to look further and some have not.
    monkeypatch.setattr(reference, "SPAN", span)
    monkeypatch.setattr(reference, "WIDER", 2)
    state, capacities = at_layer(state_of(3, 2, 220, 105)), CAPACITIES[seed]
    models = {(seat, head): ClockModel(capacities[seat]) for seat in range(3) for head in range(2)}
    for step in random_steps(random.Random(seed), 100):
        of_rows = [capacities[seat] for seat in step.seats]
        rows = SeatLanes(*torch.tensor([step.seats, of_rows, step.below, step.from_]))
        slots, missed = reference.resolve(state, rows, step.required)
        for row, seat in enumerate(step.seats):
            for head in range(2):
                required = step.required[row, head].tolist()
                expected = models[seat, head].resolve(required, step.below[row], step.from_[row])
                assert (slots[row, head].tolist(), missed[row, head].tolist()) == expected
        for (seat, head), model in models.items():
            filled = int(state.filled[seat, head])
            slot_of, token_of = state.slot_of[seat, head].tolist(), state.token_of[seat, head].tolist()
            assert {token: slot for token, slot in enumerate(slot_of) if slot >= 0} == model.slot_of
            assert dict(enumerate(token_of[:filled])) == model.token_of
            assert set(token_of[filled:]) <= {STALE_TOKEN}
            # One is the other's inverse, so no slot holds two tokens and no token lies twice.
            assert {token: slot for slot, token in model.token_of.items()} == model.slot_of
            bits = state.referenced[seat, head, :filled].tolist()
            assert bits == [int(slot in model.referenced) for slot in range(filled)]
            assert int(state.hand[seat, head]) == model.hand


def filled(num_filled: int, hand: int) -> Residency:
    """One head whose slot i holds position 100 + i; the bits of 10 to 39 are set."""
    state = state_of(1, 1, 300, 75)
    bits = torch.zeros(num_filled)
    bits[10:40] = 1
    fill(state, 0, 0, torch.arange(100, 100 + num_filled), bits, hand)
    return state


@pytest.mark.usefixtures("small_tiles")
def test_protected_positions_stay_to_the_last_one(device: torch.device) -> None:
    theirs = filled(60, 45)
    mine = copy_of(theirs, device)
    # As many as may go: all but 100 to 102 and 145 to 159. And then two for which nothing is left.
    for required in (torch.arange(42), torch.tensor([80, *range(42), 81])):
        run(mine, theirs, [0], [60], required[None, None], [103], [145])
        held = theirs.token_of[0, LAYER, 0, :60]
        assert held[:3].tolist() == [100, 101, 102]
        assert held[45:].tolist() == list(range(145, 160))
        assert sorted(held[3:45].tolist()) == list(range(42))


def test_at_full_tiles_with_protected_and_mixed_bits(device: torch.device) -> None:
    source = torch.Generator().manual_seed(3)
    capacities, num_positions = [2 * kernel.TILE + 77, kernel.TILE], 3 * kernel.TILE
    theirs = state_of(2, 2, num_positions, 2 * kernel.TILE + 80)
    for seat, capacity in enumerate(capacities):
        for head in range(2):
            tokens = torch.randperm(num_positions, generator=source)[: capacity - 31 * head]
            bits = torch.rand(tokens.shape[0], generator=source) < 0.7
            fill(theirs, seat, head, tokens, bits, hand=capacity - 13)
    mine = copy_of(theirs, device)
    for count in (1500, 1, 0, 1100, 2300, 40, 300):
        required = torch.full((2, 2, max(count, 3)), -1)
        for row in range(2):
            for head in range(2):
                middle = 16 + torch.randperm(num_positions - 80, generator=source)[:count]
                required[row, head, :count] = middle
        run(mine, theirs, [1, 0], capacities, required, [16, 16], [num_positions - 64] * 2)


@pytest.mark.parametrize("is_small", [False, True])
def test_one_column_places_a_token_in_the_heads_of_all_layers(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, is_small: bool
) -> None:
    if is_small:
        monkeypatch.setattr(kernel, "TILE", 4)
        monkeypatch.setattr(kernel, "COLUMNS", 1)
    theirs = state_of(4, 2, 20, 12)
    mine = copy_of(theirs, device)
    folded, my_folded = (
        Residency(*(getattr(state, name)[:, 1:].flatten(1, 2) for name in NAMES)) for state in (theirs, mine)
    )
    for position in range(8):
        # The last row is padding.
        rows = torch.tensor([[2, 0, 3], [5, 3, 1], [1] * 3, [max(1, position - 1)] * 3])
        required = torch.tensor([position, position, -1])[:, None, None].expand(-1, 4, 1)
        slots, missed = reference.resolve(folded, SeatLanes(*rows), required)
        found = kernel.resolve(my_folded, SeatLanes(*rows.to(device)), required.to(device))
        assert missed.flatten(1).tolist() == [[True] * 4] * 2 + [[False] * 4]
        # Slot 0 keeps its sink, the others go round.
        expected = [position if position < size else 1 + (position - size) % (size - 1) for size in (5, 3)]
        assert slots.flatten(1).tolist() == [[slot] * 4 for slot in (*expected, -1)]
        assert torch.equal(found[0].cpu(), slots)
        assert torch.equal(found[1].cpu(), missed)
        assert_same(mine, theirs)
    assert theirs.token_of[0, 1:, :, :3].eq(torch.tensor([0, 7, 6])).all()
