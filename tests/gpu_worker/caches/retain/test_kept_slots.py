"""The retain cache's record of its slots, which padding leaves alone."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.caches.retain.kept_rows import KeptRows
from gpu_worker.caches.retain.kept_slots import KeptSlots
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.retain import Retained
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.lane_inputs import LaneInputs
from gpu_worker.state.slot_pool import SlotPool
from kv_store.client import RowFormat

SHAPE = CacheShape(4, 3, 2, 1, RowFormat(4, "fp32"), 64, 0.5, torch.device("cpu"))
LAYERS = range(SHAPE.num_layers)


def retained(*counts: int, notes: float | None = None) -> Retained:
    """Heads that keep the first so many positions."""
    every = torch.arange(max(counts)).expand(2, -1)
    positions = every.where(every < torch.tensor(counts)[:, None], -1)
    rows = torch.zeros(*positions.shape, 4)
    return Retained(positions, rows, rows, None if notes is None else torch.full(positions.shape, notes))


def rows(*pairs: tuple[int, int]) -> LaneInputs:
    """Return the inputs of lanes given as (seat, position); a position of -1 is padding."""
    seats, positions = torch.tensor(pairs).T
    unused = torch.zeros_like(seats)
    return LaneInputs(unused, positions, seats, *[unused] * 7)


def fill(kept: KeptSlots, seat: int, layers: range, what: Retained, room: int) -> None:
    """As the cache does: rows go to slots of a pool, in which one block of a head is enough here."""
    pool = SlotPool(6, SHAPE.row_format, SHAPE.device)
    tables = BlockTables(pool, SHAPE.max_num_seqs, SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.max_model_len)
    tables.assign(seat, 8)
    KeptRows(SHAPE, pool, tables, kept).write(seat, layers, what, room)


def filled(room: int = 2, has_notes: bool = True) -> KeptSlots:
    kept = KeptSlots(SlotPool(1, SHAPE.row_format, SHAPE.device), SHAPE)
    for seat in range(4):
        kept.make_room(seat, 8, has_notes)
        for layer in LAYERS:
            fill(kept, seat, range(layer, layer + 1), retained(5, 3, notes=1.5), room)
    return kept


def everything(kept: KeptSlots) -> list[Tensor]:
    tensors = (kept.lengths, kept.limits, kept.positions, kept.notes)
    return [tensor[:4].clone() for tensor in tensors if tensor is not None]


def test_heads_are_filled_from_the_first_slot_on_and_grow_by_their_own_lengths() -> None:
    kept = filled(has_notes=False)
    step = rows((2, 40), (0, 50))
    slots = kept.appended(step)
    assert slots[0, 0].tolist() == [5, 3]
    lengths = kept.take_in(step, slots)
    assert lengths[1].tolist() == [[6, 4]] * 3
    assert kept.positions[2, 1].tolist() == [[0, 1, 2, 3, 4, 40, -1, -1], [0, 1, 2, 40, -1, -1, -1, -1]]
    assert kept.lengths[1, 1].tolist() == [5, 3]
    assert not kept.is_full(step).any()
    kept.take_in(step, kept.appended(step))
    assert kept.is_full(step).all()


def test_a_slot_that_is_taken_over_counts_once() -> None:
    kept = filled(room=1)
    step = rows((3, 40))
    kept.take_in(step, kept.appended(step))
    assert kept.is_full(step).all()
    again = rows((3, 41))
    lengths = kept.take_in(again, torch.ones(1, 3, 2, dtype=torch.int64))
    assert lengths.flatten().tolist() == [6, 4] * 3
    assert kept.positions[3, 2, 1, :4].tolist() == [0, 41, 2, 40]
    assert kept.notes is not None
    # What comes new has gathered nothing.
    assert kept.notes[3, 2, 1, :4].tolist() == [1.5, 0.0, 1.5, 0.0]


def test_padding_writes_nothing_wherever_its_seat_is() -> None:
    kept = filled()
    before = everything(kept)
    step = rows((1, -1), (1, -1))
    lengths = kept.take_in(step, kept.appended(step))
    assert not lengths.any()
    kept.change_notes(step, 1, 8, lambda notes: notes.add_(torch.rand(2, 2, 8)))
    for one, other in zip(everything(kept), before, strict=True):
        assert torch.equal(one, other)


def test_padding_beside_others_leaves_only_theirs_changed() -> None:
    kept = filled()
    before = everything(kept)
    step = rows((0, 40), (1, -1))
    kept.take_in(step, kept.appended(step))
    kept.change_notes(step, 2, 8, lambda notes: notes.add_(1.0))
    for one, other in zip(everything(kept), before, strict=True):
        assert torch.equal(one[1:], other[1:])
    assert kept.notes is not None
    assert kept.notes[0, 2, 0].tolist() == [2.5] * 5 + [1.0] * 3


def test_more_room_keeps_what_is_there() -> None:
    kept = filled(has_notes=False)
    positions = kept.positions.clone()
    kept.make_room(1, 20, has_notes=True)
    assert kept.width == 32
    assert torch.equal(kept.positions[:4, ..., :8], positions[:4])
    assert (kept.positions[:4, ..., 8:] == -1).all()
    assert kept.notes is not None
    assert kept.notes.shape == kept.positions.shape
    wider = filled()
    wider.make_room(0, 20, has_notes=False)
    assert wider.notes is not None
    assert wider.notes[0, 1, 0].tolist() == [1.5] * 5 + [0.0] * 27


def test_who_came_before_leaves_nothing_in_a_layer() -> None:
    kept = filled()
    fill(kept, 2, range(1, 2), retained(2, 1), 3)
    assert kept.positions[2, 1].tolist() == [[0, 1] + [-1] * 6, [0] + [-1] * 7]
    assert (kept.lengths[2, 1].tolist(), kept.limits[2, 1].tolist()) == ([2, 1], [5, 4])
    assert kept.notes is not None
    assert not kept.notes[2, 1].any()
