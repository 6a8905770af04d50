"""The clock's kernel against the reference, the complete state after every step."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.resolve import Residency, SeatLanes, reference

kernel = pytest.importorskip("gpu_worker.kernels.resolve.kernel")

NUM_LAYERS, LAYER, GARBAGE = 3, 1, 7777
# What a free slot says that it holds: a token that would be evicted from it.
STALE_TOKEN = 5
NAMES = [field.name for field in fields(Residency)]


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


def check_invariants(state: Residency, capacities: list[int]) -> None:
    at = at_layer(state)
    for seat, capacity in enumerate(capacities):
        for head in range(at.hand.shape[1]):
            filled = int(at.filled[seat, head])
            assert 0 <= filled <= capacity
            assert 0 <= int(at.hand[seat, head]) < capacity
            tokens = at.token_of[seat, head, :filled].tolist()
            slot_of = at.slot_of[seat, head].tolist()
            assert {token: slot for slot, token in enumerate(tokens)} == {
                token: slot for token, slot in enumerate(slot_of) if slot >= 0
            }
            assert at.referenced[seat, head, :filled].le(1).all()


def run(
    mine: Residency,
    theirs: Residency,
    seats: list[int],
    capacities: list[int],
    required: Tensor,
    below: list[int],
    from_: list[int],
) -> Tensor:
    """One step of both; the misses."""
    device = mine.device
    rows = [seats, [capacities[seat] for seat in seats], below, from_]
    slots, missed = reference.resolve(at_layer(theirs), SeatLanes(*torch.tensor(rows)), required)
    # A transposed copy: neither the last stride nor any other is the usual one.
    strided = required.transpose(0, 2).contiguous().transpose(0, 2).to(device)
    my_rows = SeatLanes(*torch.tensor(rows, device=device))
    found = kernel.resolve(at_layer(mine), my_rows, strided)
    assert found[0].dtype == torch.int64
    assert torch.equal(found[1].cpu(), missed)
    assert torch.equal(found[0].cpu(), slots)
    # Other layers, and what lies beyond the slots in use, are compared too.
    for name in NAMES:
        assert torch.equal(getattr(mine, name).cpu(), getattr(theirs, name)), name
    check_invariants(theirs, capacities)
    return missed


@pytest.mark.parametrize(
    ("seed", "capacities"), [(0, [63, 17, 40]), (1, [64, 65, 16]), (2, [31, 90, 33]), (3, [15, 14, 100])]
)
@pytest.mark.usefixtures("small_tiles")
def test_random_traces(device: torch.device, seed: int, capacities: list[int]) -> None:
    source = random.Random(seed)
    num_heads, num_positions = 2, 220
    theirs = state_of(3, num_heads, num_positions, 105)
    mine = copy_of(theirs, device)
    num_tokens, num_sinks = [30, 12, 50], [source.randrange(0, 4) for _ in range(3)]
    seen: set[str] = set()
    for _ in range(14):
        # Rows of padding stand on the seat that is left.
        seats = source.sample(range(3), source.randrange(1, 4))
        pads = [next(iter({0, 1, 2} - set(seats)))] * source.randrange(0, 2) if len(seats) < 3 else []
        width = source.choice([1, 7, 8, 9, 16, 27])
        below = [num_sinks[seat] for seat in seats]
        from_ = [max(num_sinks[seat], num_tokens[seat] - 3) for seat in seats]
        required = torch.full((len(seats) + len(pads), num_heads, width), -1)
        for row, seat in enumerate(seats):
            for head in range(num_heads):
                # Near the last ones now and then: hits; sometimes more than there is room for; and only pads.
                count = min(source.randrange(0, width + 1), num_tokens[seat])
                span = source.choice([num_tokens[seat], min(num_tokens[seat], count + 4)])
                chosen = source.sample(range(num_tokens[seat] - span, num_tokens[seat]), count)
                chosen += [-1] * (width - count)
                source.shuffle(chosen)
                required[row, head] = torch.tensor(chosen)
        old = copy_of(theirs, torch.device("cpu"))
        missed = run(
            mine, theirs, seats + pads, capacities, required, below + [0] * len(pads), from_ + [0] * len(pads)
        )
        for row, seat in enumerate(seats):
            moved = old.hand[seat, LAYER] != theirs.hand[seat, LAYER]
            grown = old.filled[seat, LAYER] < theirs.filled[seat, LAYER]
            # After a hand that went round in vain, only what was required just now has its bit set.
            bits = theirs.referenced[seat, LAYER, :, : capacities[seat]].sum(dim=-1)
            in_vain = moved & (bits == (required[row] >= 0).sum(dim=-1))
            hit = (required[row] >= 0) & ~missed[row]
            kinds = {"moved": moved, "grown": grown, "both": moved & grown, "in vain": in_vain, "hit": hit}
            seen |= {kind for kind, happened in kinds.items() if happened.any()}
            num_tokens[seat] = min(num_positions, num_tokens[seat] + source.randrange(0, 9))
    assert seen == {"moved", "grown", "both", "in vain", "hit"}


@pytest.mark.usefixtures("small_tiles")
def test_all_bits_set_and_wrap(device: torch.device) -> None:
    capacities = [33, 48]
    theirs = state_of(2, 2, 300, 50)
    mine = copy_of(theirs, device)
    below, from_ = [2, 0], [290, 300]
    full = torch.full((2, 2, 48), -1)
    full[0, :, :33], full[1] = torch.arange(33), torch.arange(48)
    run(mine, theirs, [0, 1], capacities, full, below, from_)
    assert theirs.referenced[0, LAYER, :, :33].all()
    # Every bit is set, the hand stands at 0 and goes round; then it stands amid the ring.
    for begin, count in ((100, 20), (120, 13), (140, 31), (171, 1), (40, 27)):
        required = torch.arange(begin, begin + count).expand(2, 2, count)
        assert run(mine, theirs, [0, 1], capacities, required, below, from_).any()


def filled(num_filled: int, hand: int) -> Residency:
    """One head whose slot i holds position 100 + i; the bits of 10 to 39 are set."""
    state = state_of(1, 1, 300, 75)
    bits = torch.zeros(num_filled)
    bits[10:40] = 1
    fill(state, 0, 0, torch.arange(100, 100 + num_filled), bits, hand)
    return state


@pytest.mark.parametrize(
    ("num_filled", "hand", "expected", "new_hand"),
    [
        (67, 50, {1: 67, 2: 68, 3: 69, 4: 51, 6: 52}, 53),
        # No slot of the first tile is clear.
        (68, 12, {1: 68, 2: 69, 3: 40, 4: 41, 6: 42}, 43),
        (70, 69, {1: 69, 2: 0, 3: 1, 4: 2, 6: 3}, 4),
        # Free slots are enough, and the hand stays.
        (65, 33, {1: 65, 2: 66, 3: 67, 4: 68, 6: 69}, 33),
        # The hand stands among the free slots.
        (68, 68, {1: 68, 2: 69, 3: 0, 4: 1, 6: 2}, 3),
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_free_slots_come_first(
    device: torch.device, num_filled: int, hand: int, expected: dict[int, int], new_hand: int
) -> None:
    theirs = filled(num_filled, hand)
    mine = copy_of(theirs, device)
    run(mine, theirs, [0], [70], torch.tensor([[[1, -1, 2, 150, 3, 4, 6]]]), [0], [300])
    assert {token: int(theirs.slot_of[0, LAYER, 0, token]) for token in expected} == expected
    assert int(theirs.hand[0, LAYER, 0]) == new_hand
    assert int(theirs.filled[0, LAYER, 0]) == 70


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


@pytest.mark.usefixtures("small_tiles")
def test_hits_before_the_first_misses_are_not_evicted(device: torch.device) -> None:
    theirs = filled(40, 12)
    mine = copy_of(theirs, device)
    # Eight hits, a tile of columns, stand at the hand; for the misses behind them, all clear slots are too few.
    required = torch.tensor([*range(112, 120), *range(15)])
    run(mine, theirs, [0], [40], required[None, None], [0], [300])
    assert theirs.slot_of[0, LAYER, 0, :15].tolist() == [*range(10), *range(20, 25)]


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
    for step in range(7):
        # The last row is padding.
        rows = [[2, 0, 3], [6, 3, 1], [1] * 3, [max(1, step - 1)] * 3]
        required = torch.tensor([step, step + 1, -1])
        expected = reference.resolve(
            folded, SeatLanes(*torch.tensor(rows)), required[:, None, None].expand(-1, 4, 1)
        )
        found = kernel.resolve(
            my_folded,
            SeatLanes(*torch.tensor(rows, device=device)),
            required.to(device)[:, None, None].expand(-1, 4, 1),
        )
        assert expected[1].all(dim=-1).all(dim=-1).tolist() == [True] * 2 + [False]
        for mine_, theirs_ in zip(found, expected, strict=True):
            assert torch.equal(mine_.cpu(), theirs_)
        for name in NAMES:
            assert torch.equal(getattr(mine, name).cpu(), getattr(theirs, name)), name
    assert theirs.hand[[2, 0], 1:].ne(0).all()


def test_nothing_required(device: torch.device) -> None:
    theirs = state_of(1, 2, 40, 25)
    mine = copy_of(theirs, device)
    run(mine, theirs, [0], [20], torch.arange(9).expand(1, 2, 9), [0], [40])
    run(mine, theirs, [0], [20], torch.full((1, 2, 4), -1), [0], [40])
    empty = torch.full((1, 2, 0), 0)
    slots, missed = kernel.resolve(at_layer(mine), SeatLanes(*torch.zeros(4, 1).long()), empty.to(device))
    assert slots.shape == missed.shape == empty.shape
