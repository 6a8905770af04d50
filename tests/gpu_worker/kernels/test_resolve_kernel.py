"""The clock's kernels against the reference, the complete state after every step."""

from __future__ import annotations

import random

import pytest
import torch

from gpu_worker.kernels.resolve import Residency, SeatRows, resolve

kernel = pytest.importorskip("gpu_worker.kernels.resolve.kernel")

NUM_LAYERS, LAYER, GARBAGE = 3, 1, 7777


def state_of(num_seats: int, num_heads: int, num_positions: int, capacities: list[int]) -> Residency:
    """One layer of a larger state, so that no view is contiguous; garbage where no call may look."""
    num_slots = max(capacities) + 5
    shape = (num_seats, NUM_LAYERS, num_heads)
    slot_of = torch.full((*shape, num_positions), GARBAGE, dtype=torch.int32)
    token_of = torch.full((*shape, num_slots), GARBAGE, dtype=torch.int32)
    referenced = torch.ones((*shape, num_slots), dtype=torch.bool)
    hand = torch.full(shape, GARBAGE)
    slot_of[:, LAYER], hand[:, LAYER] = -1, 0
    for seat, capacity in enumerate(capacities):
        token_of[seat, LAYER, :, :capacity] = -1
        referenced[seat, LAYER, :, :capacity] = False
    return Residency(slot_of, token_of, referenced, hand)


def at_layer(state: Residency, device: torch.device | None = None) -> Residency:
    tensors = (state.slot_of, state.token_of, state.referenced, state.hand)
    return Residency(*((t if device is None else t.to(device))[:, LAYER] for t in tensors))


def copy_of(state: Residency, device: torch.device) -> Residency:
    tensors = (state.slot_of, state.token_of, state.referenced, state.hand)
    return Residency(*(t.clone().to(device) for t in tensors))


def check(mine: Residency, theirs: Residency, capacities: list[int]) -> None:
    assert torch.equal(mine.slot_of.cpu(), theirs.slot_of)
    assert torch.equal(mine.hand.cpu(), theirs.hand)
    assert torch.equal(mine.token_of.cpu(), theirs.token_of)
    # Bytes, for a mark that stayed behind would still count as True.
    bits, expected = mine.referenced.cpu().view(torch.uint8), theirs.referenced.view(torch.uint8)
    for seat, capacity in enumerate(capacities):
        assert torch.equal(bits[seat, :, :, :capacity], expected[seat, :, :, :capacity])
        assert (bits[seat, :, :, capacity:] == 1).all()
    others = [layer for layer in range(NUM_LAYERS) if layer != LAYER]
    assert (bits[:, others] == 1).all()


def run(
    mine: Residency,
    theirs: Residency,
    seats: list[int],
    capacities: list[int],
    required: torch.Tensor,
    below: list[int],
    from_: list[int],
) -> torch.Tensor:
    """One step of both; the misses."""
    own = [capacities[seat] for seat in seats]
    slots, missed = resolve(at_layer(theirs), seats, own, required, below, from_)
    device = mine.slot_of.device
    rows = SeatRows.of(seats, own, below, from_, device)
    found = kernel.resolve_on_device(at_layer(mine), rows, required.to(device))
    assert found[0].dtype == torch.int64
    assert torch.equal(found[1].cpu(), missed)
    assert torch.equal(found[0].cpu(), slots)
    check(mine, theirs, capacities)
    return missed


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 16 slots and of 8 columns, so that small states span many."""
    monkeypatch.setattr(kernel, "TILE", 16)
    monkeypatch.setattr(kernel, "COLUMNS", 8)


@pytest.mark.parametrize(
    ("seed", "capacities"), [(0, [63, 17, 40]), (1, [64, 65, 16]), (2, [31, 90, 33]), (3, [15, 14, 100])]
)
@pytest.mark.usefixtures("small_tiles")
def test_random_traces(device: torch.device, seed: int, capacities: list[int]) -> None:
    source = random.Random(seed)
    num_heads, num_positions = 2, 220
    theirs = state_of(3, num_heads, num_positions, capacities)
    mine = copy_of(theirs, device)
    num_tokens, num_sinks = [30, 12, 50], [source.randrange(0, 4) for _ in range(3)]
    any_wrap = any_free = False
    for _ in range(15):
        seats = source.sample(range(3), source.randrange(1, 4))
        width = source.randrange(1, 27)
        below = [num_sinks[seat] for seat in seats]
        from_ = [max(num_sinks[seat], num_tokens[seat] - 3) for seat in seats]
        required = torch.full((len(seats), num_heads, width), -1)
        for row, seat in enumerate(seats):
            for head in range(num_heads):
                tokens = theirs.token_of[seat, LAYER, head, : capacities[seat]].tolist()
                kept = [t for t in tokens if t >= 0 and (t < below[row] or t >= from_[row])]
                room = capacities[seat] - len(kept)
                count = min(source.randrange(0, width + 1), room, num_tokens[seat])
                # Near the last ones now and then: hits; and only pads.
                span = source.choice([num_tokens[seat], min(num_tokens[seat], count + 4)])
                chosen = source.sample(range(num_tokens[seat] - span, num_tokens[seat]), count)
                # Sinks and window are required only where they are resident or there is room.
                chosen = [t for t in chosen if t in kept or below[row] <= t < from_[row]]
                chosen += [-1] * (width - len(chosen))
                source.shuffle(chosen)
                required[row, head] = torch.tensor(chosen)
        bits_before = theirs.referenced[:, LAYER].clone()
        missed = run(mine, theirs, seats, capacities, required, below, from_)
        for row, seat in enumerate(seats):
            # After a hand that went round in vain, only what was required just now has its bit set.
            bits_after = theirs.referenced[seat, LAYER, :, : capacities[seat]].sum(dim=-1)
            num_before = bits_before[seat, :, : capacities[seat]].sum(dim=-1)
            num_required = (required[row] >= 0).sum(dim=-1)
            went_round = missed[row].any(dim=-1) & (bits_after == num_required) & (num_before > num_required)
            any_wrap |= bool(went_round.any())
            any_free |= bool((theirs.token_of[seat, LAYER, :, : capacities[seat]] < 0).any())
            num_tokens[seat] = min(num_positions, num_tokens[seat] + source.randrange(0, 9))
    assert any_free
    assert any_wrap


@pytest.mark.usefixtures("small_tiles")
def test_all_bits_set_and_wrap(device: torch.device) -> None:
    capacities = [33, 48]
    theirs = state_of(2, 2, 300, capacities)
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


def filled(capacity: int, free: tuple[int, ...], hand: int) -> Residency:
    """One head whose slot i holds position 100 + i; the bits of 10 to 39 are set."""
    state = state_of(1, 1, 300, [capacity])
    held = torch.tensor([slot for slot in range(capacity) if slot not in free])
    state.token_of[0, LAYER, 0, held] = (held + 100).int()
    state.slot_of[0, LAYER, 0, held + 100] = held.int()
    state.referenced[0, LAYER, 0, 10:40] = True
    state.hand[0, LAYER, 0] = hand
    return state


@pytest.mark.parametrize(
    ("hand", "expected"),
    [
        (50, {1: 69, 2: 5, 3: 44, 4: 51, 6: 52}),
        # No slot of the first tile is free or clear.
        (12, {1: 44, 2: 69, 3: 5, 4: 40, 6: 41}),
        (69, {1: 69, 2: 5, 3: 44, 4: 0, 6: 1}),
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_free_slots_beyond_clear_ones_come_first(
    device: torch.device, hand: int, expected: dict[int, int]
) -> None:
    theirs = filled(70, (5, 44, 69), hand)
    mine = copy_of(theirs, device)
    run(mine, theirs, [0], [70], torch.tensor([[[1, -1, 2, 150, 3, 4, 6]]]), [0], [300])
    assert {token: int(theirs.slot_of[0, LAYER, 0, token]) for token in expected} == expected


@pytest.mark.usefixtures("small_tiles")
def test_protected_positions_stay_to_the_last_one(device: torch.device) -> None:
    theirs = filled(60, (), 45)
    mine = copy_of(theirs, device)
    # As many as may go: all but 100 to 102 and 145 to 159.
    run(mine, theirs, [0], [60], torch.arange(42)[None, None], [103], [145])
    held = theirs.token_of[0, LAYER, 0, :60]
    assert held[:3].tolist() == [100, 101, 102]
    assert held[45:].tolist() == list(range(145, 160))


def test_at_full_tiles_with_protected_and_mixed_bits(device: torch.device) -> None:
    source = torch.Generator().manual_seed(3)
    capacities, num_positions = [2 * kernel.TILE + 77, kernel.TILE], 3 * kernel.TILE
    theirs = state_of(2, 2, num_positions, capacities)
    for seat, capacity in enumerate(capacities):
        for head in range(2):
            tokens = torch.randperm(num_positions, generator=source)[:capacity]
            theirs.token_of[seat, LAYER, head, :capacity] = tokens.int()
            theirs.slot_of[seat, LAYER, head, tokens] = torch.arange(capacity).int()
            bits = torch.rand(capacity, generator=source) < 0.7
            theirs.referenced[seat, LAYER, head, :capacity] = bits
            theirs.hand[seat, LAYER, head] = capacity - 13
    mine = copy_of(theirs, device)
    for count in (1500, 1, 0, 1100):
        required = torch.full((2, 2, 1500), -1)
        for row in range(2):
            for head in range(2):
                middle = 16 + torch.randperm(num_positions - 80, generator=source)[:count]
                required[row, head, :count] = middle
        # The smaller seat keeps what it must: less than a quarter is protected.
        run(
            mine,
            theirs,
            [1, 0],
            capacities,
            required[:, :, : max(count, 3)],
            [16, 16],
            [num_positions - 64] * 2,
        )


@pytest.mark.usefixtures("small_tiles")
def test_one_position_in_expanded_rows(device: torch.device) -> None:
    theirs = state_of(3, 4, 20, [9, 9, 9])
    mine = copy_of(theirs, device)
    for step in range(8):
        required = torch.tensor([step, step + 1, step + 2])[:, None, None].expand(-1, 4, 1)
        run(mine, theirs, [2, 0, 1], [9, 9, 9], required, [1] * 3, [max(1, step - 4)] * 3)


def test_nothing_required(device: torch.device) -> None:
    theirs = state_of(1, 2, 40, [20])
    mine = copy_of(theirs, device)
    run(mine, theirs, [0], [20], torch.arange(9).expand(1, 2, 9), [0], [40])
    run(mine, theirs, [0], [20], torch.full((1, 2, 4), -1), [0], [40])
    run(mine, theirs, [0], [20], torch.empty((1, 2, 0), dtype=torch.int64), [0], [40])


def test_no_room_leaves_misses_without_a_slot(device: torch.device) -> None:
    mine = copy_of(state_of(1, 1, 40, [4]), device)
    rows = SeatRows.of([0], [4], [0], [40], device)
    slots, missed = kernel.resolve_on_device(at_layer(mine), rows, torch.arange(6, device=device)[None, None])
    assert missed.all()
    assert slots.flatten().tolist() == [0, 1, 2, 3, -1, -1]
    assert (mine.slot_of[0, LAYER, 0, 4:] == -1).all()
