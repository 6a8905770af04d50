"""What the retain cache knows of its slots, and that padding leaves it alone."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.caches.retain.kept_slots import KeptSlots
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.h2o.policy import H2O
from gpu_worker.policies.retain import Retained, RetainPolicy
from gpu_worker.policies.snapkv.policy import SnapKV
from gpu_worker.state.row_inputs import RowInputs

SHAPE = CacheShape(4, 3, 2, 1, 4, 64, 0.5, torch.device("cpu"))
LAYERS = range(1, 3)


def retained(*counts: int, scores: float | None = None, degrees: float | None = None) -> Retained:
    """Heads that keep the first so many positions."""
    every = torch.arange(max(counts)).expand(2, -1)
    positions = every.where(every < torch.tensor(counts)[:, None], -1)
    rows = torch.zeros(*positions.shape, 4)
    filled = [None if value is None else torch.full(positions.shape, value) for value in (degrees, scores)]
    return Retained(positions, rows, rows, filled[0], filled[1])


def rows(*pairs: tuple[int, int]) -> RowInputs:
    """Of (seat, position); a position of -1 is padding."""
    seats, positions = torch.tensor(pairs).T
    unused = torch.zeros_like(seats)
    return RowInputs(unused, positions, seats, *[unused] * 7)


def filled(policy: RetainPolicy, room: int = 2) -> KeptSlots:
    kept = KeptSlots(SHAPE)
    kept.make_room(8, policy)
    for seat in range(4):
        for layer in LAYERS:
            kept.fill(seat, range(layer, layer + 1), retained(5, 3, scores=1.5, degrees=2.0), room)
    return kept


def everything(kept: KeptSlots) -> list[Tensor]:
    tensors = (kept.lengths, kept.limits, kept.positions, kept.scores, kept.log_degrees)
    return [tensor.clone() for tensor in tensors if tensor is not None]


def test_heads_are_filled_from_the_first_slot_on_and_grow_by_their_own_lengths() -> None:
    kept = filled(SnapKV())
    step = rows((2, 40), (0, 50))
    slots = kept.appended(step, LAYERS)
    assert slots[0, 0].tolist() == [5, 3]
    lengths = kept.take_in(step, LAYERS, slots)
    assert lengths[1].tolist() == [[6, 4], [6, 4]]
    assert kept.positions[2, 1].tolist() == [[0, 1, 2, 3, 4, 40, -1, -1], [0, 1, 2, 40, -1, -1, -1, -1]]
    assert kept.lengths[1, 1].tolist() == [5, 3]
    assert not kept.is_full(step, LAYERS).any()
    kept.take_in(step, LAYERS, kept.appended(step, LAYERS))
    assert kept.is_full(step, LAYERS).all()


def test_a_slot_that_is_taken_over_counts_once() -> None:
    kept = filled(H2O(), room=1)
    step = rows((3, 40))
    kept.take_in(step, LAYERS, kept.appended(step, LAYERS))
    assert kept.is_full(step, LAYERS).all()
    again = rows((3, 41))
    lengths = kept.take_in(again, LAYERS, torch.ones(1, 2, 2, dtype=torch.int64))
    assert lengths.flatten().tolist() == [6, 4, 6, 4]
    assert kept.positions[3, 2, 1, :4].tolist() == [0, 41, 2, 40]
    assert kept.scores is not None
    # What comes new has gathered nothing.
    assert kept.scores[3, 2, 1, :4].tolist() == [1.5, 0.0, 1.5, 0.0]


def test_padding_writes_nothing_wherever_its_seat_is() -> None:
    for policy in (H2O(), Chelsea()):
        kept = filled(policy)
        before = everything(kept)
        step = rows((1, -1), (1, -1))
        lengths = kept.take_in(step, LAYERS, kept.appended(step, LAYERS))
        assert not lengths.any()
        if policy.observes:
            kept.observe(policy, step, 1, torch.rand(2, 2, 8))
        for one, other in zip(everything(kept), before, strict=True):
            assert torch.equal(one, other)


def test_padding_beside_others_leaves_only_theirs_changed() -> None:
    kept = filled(H2O())
    before = everything(kept)
    step = rows((0, 40), (1, -1))
    kept.take_in(step, LAYERS, kept.appended(step, LAYERS))
    kept.observe(H2O(), step, 2, torch.ones(2, 2, 8))
    for one, other in zip(everything(kept), before, strict=True):
        assert torch.equal(one[1:], other[1:])
    assert kept.scores is not None
    assert kept.scores[0, 2, 0].tolist() == [2.5] * 5 + [1.0] * 3


def test_more_room_keeps_what_is_there() -> None:
    kept = filled(Chelsea())
    positions = kept.positions.clone()
    kept.make_room(20, H2O())
    assert kept.width == 32
    assert torch.equal(kept.positions[..., :8], positions)
    assert (kept.positions[..., 8:] == -1).all()
    assert kept.scores is not None
    assert kept.scores.shape == kept.positions.shape
    assert kept.log_degrees is not None
    assert kept.log_degrees.shape == kept.positions.shape
    torch.testing.assert_close(kept.log_degrees[0, 1, 0, :6].exp(), torch.tensor([2.0] * 5 + [1.0]))


def test_who_came_before_leaves_nothing_in_a_layer() -> None:
    kept = filled(H2O())
    kept.fill(2, range(1, 2), retained(2, 1), 3)
    assert kept.positions[2, 1].tolist() == [[0, 1] + [-1] * 6, [0] + [-1] * 7]
    assert (kept.lengths[2, 1].tolist(), kept.limits[2, 1].tolist()) == ([2, 1], [5, 4])
    assert kept.scores is not None
    assert not kept.scores[2, 1].any()
