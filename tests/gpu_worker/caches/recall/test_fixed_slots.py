"""The ring of sinks, window and new token, against a window that is kept by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gpu_worker.caches.recall.fixed_slots import FixedSlots
from gpu_worker.policies.base import CacheShape
from gpu_worker.state.lane_inputs import NUM_FIELDS, LaneInputs, padding
from gpu_worker.state.slot_pool import SlotPool
from kv_store.client import RowFormat

NUM_SEATS, NUM_LAYERS, NUM_KV_HEADS = 4, 3, 2
SHAPE = CacheShape(
    NUM_SEATS, NUM_LAYERS, NUM_KV_HEADS, 1, RowFormat(8, "fp32"), 512, 1.0, torch.device("cpu")
)
LAYERS = range(NUM_LAYERS)


@dataclass
class Plan:
    num_sink: int


class Walker:
    """Stands for a sequence: whose window holds at most `num_recent` tokens. Each token has a pool row of its own."""

    def __init__(self, seat: int, num_sink: int, num_recent: int, num_tokens: int) -> None:
        self.seat, self.plan = seat, Plan(num_sink)
        self.num_tokens, self.ring_size = num_tokens, num_recent + 1
        self.window = list(range(num_tokens - num_recent, num_tokens))

    @property
    def ring_column(self) -> int:
        return self.plan.num_sink + self.num_tokens % self.ring_size

    def pool_rows(self, positions: list[int], layer: int) -> Tensor:
        """[H_kv, T]"""
        heads = torch.arange(NUM_KV_HEADS)[:, None]
        return torch.tensor(positions) + 1000 * self.seat + 10_000 * layer + 100_000 * heads

    def fill(self, fixed: FixedSlots) -> None:
        fixed.make_room(self.plan.num_sink + self.ring_size)
        fixed.take(self.seat)
        positions = [*range(self.plan.num_sink), *self.window]
        rows = torch.stack([self.pool_rows(positions, layer) for layer in LAYERS])
        fixed.fill(self, LAYERS, torch.tensor(positions), rows)  # type: ignore[arg-type]

    def attended(self, layer: int) -> list[set[int]]:
        """Pool rows of sinks and window, by head."""
        positions = [*range(self.plan.num_sink), *self.window]
        return [set(head) for head in self.pool_rows(positions, layer).tolist()]

    def empty(self, fixed: FixedSlots) -> None:
        fixed.clear_window(self)  # type: ignore[arg-type]
        self.window = []


def found(fixed: FixedSlots, walker: Walker, layer: int) -> list[set[int]]:
    width = walker.plan.num_sink + walker.ring_size
    table = fixed.at(layer, width)[walker.seat].tolist()
    heads = [[row for row in head if row >= 0] for head in table]
    assert all(len(head) == len(set(head)) for head in heads)
    return [set(head) for head in heads]


def step(fixed: FixedSlots, walkers: list[Walker], num_padding: int = 0) -> Tensor:
    """One token for everyone; what was pushed out, [B, layers, H]."""
    table = torch.zeros(NUM_FIELDS, len(walkers) + num_padding, dtype=torch.int64)
    table[:, len(walkers) :] = torch.tensor(padding(NUM_SEATS))[:, None]
    rows = LaneInputs.of(table)
    for row, walker in enumerate(walkers):
        rows.seats[row], rows.positions[row], rows.ring[row] = (
            walker.seat,
            walker.num_tokens,
            walker.ring_column,
        )
    new_slots = torch.full((table.shape[1], len(LAYERS), NUM_KV_HEADS), -1, dtype=torch.int32)
    for row, walker in enumerate(walkers):
        by_layer = [walker.pool_rows([walker.num_tokens], layer)[:, 0] for layer in LAYERS]
        new_slots[row] = torch.stack(by_layer).int()
    leaving = fixed.leaving(rows)
    fixed.take_in(rows, new_slots)
    for walker in walkers:
        walker.window = [*walker.window, walker.num_tokens][-walker.ring_size :]
        walker.num_tokens += 1
    return leaving


@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize(("num_sink", "num_recent"), [(4, 13), (1, 0), (0, 1), (7, 64)])
def test_over_many_steps_the_ring_holds_sinks_and_the_last_tokens(
    num_sink: int, num_recent: int, num_padding: int
) -> None:
    fixed = FixedSlots(SlotPool(1, SHAPE.row_format, SHAPE.device), SHAPE)
    one = Walker(1, num_sink, num_recent, 100)
    other = Walker(3, 2, 5, 77)
    one.fill(fixed)
    other.fill(fixed)
    for _ in range(3 * one.ring_size + 5):
        last = one.num_tokens - one.ring_size
        is_full = len(one.window) == one.ring_size
        leaving = step(fixed, [one, other], num_padding)
        for place, layer in enumerate(LAYERS):
            assert found(fixed, one, layer) == one.attended(layer)
            assert found(fixed, other, layer) == other.attended(layer)
            pushed_out = one.pool_rows([last], layer)[:, 0] if is_full else torch.full((NUM_KV_HEADS,), -1)
            assert leaving[0, place].tolist() == pushed_out.tolist()
        assert bool((leaving[2:] == -1).all())
    assert bool((fixed.table[NUM_SEATS] == -1).all())
    assert bool((fixed.table[[one.seat, other.seat], ..., -1] == -1).all())


def test_a_cleared_window_leaves_the_sinks_and_fills_anew() -> None:
    fixed = FixedSlots(SlotPool(1, SHAPE.row_format, SHAPE.device), SHAPE)
    one = Walker(0, 3, 20, 60)
    one.window = []  # as ClusterKV's after its prompt
    one.fill(fixed)
    other = Walker(1, 3, 20, 60)
    other.fill(fixed)
    untouched = fixed.table[1].clone()
    for number in range(130):
        if number and number % 20 == 0:
            positions = torch.tensor(one.window)
            for layer in LAYERS:
                expected = one.pool_rows(one.window, layer)
                assert torch.equal(fixed.window_rows(one, layer, positions), expected)  # type: ignore[arg-type]
            one.empty(fixed)
        step(fixed, [one])
        for layer in LAYERS:
            assert found(fixed, one, layer) == one.attended(layer)
    assert torch.equal(fixed.table[1], untouched)


def test_a_larger_table_keeps_what_the_smaller_one_held() -> None:
    fixed = FixedSlots(SlotPool(1, SHAPE.row_format, SHAPE.device), SHAPE)
    assert fixed.width == 0
    narrow = Walker(0, 2, 3, 50)
    narrow.fill(fixed)
    before = fixed.table
    fixed.make_room(fixed.width)
    assert fixed.table is before
    for _ in range(5):
        step(fixed, [narrow], num_padding=1)
    wide = Walker(2, 5, 100, 200)
    wide.fill(fixed)
    assert fixed.table is not before
    assert fixed.width >= 106
    for _ in range(120):
        for layer in LAYERS:
            assert found(fixed, narrow, layer) == narrow.attended(layer)
            assert found(fixed, wide, layer) == wide.attended(layer)
        step(fixed, [narrow, wide], num_padding=2)
    # Beyond what is its own nothing is read into a narrow sequence's attention.
    assert bool((fixed.table[0, 1:, :, 2 + narrow.ring_size :] == -1).all())
    assert bool((fixed.table[[0, 2, NUM_SEATS], ..., -1] == -1).all())


def test_the_next_on_a_seat_finds_nothing_of_the_last() -> None:
    source = random.Random(0)
    fixed = FixedSlots(SlotPool(1, SHAPE.row_format, SHAPE.device), SHAPE)
    for _ in range(12):
        walker = Walker(1, source.randrange(6), source.randrange(40), 80)
        walker.fill(fixed)
        for _ in range(source.randrange(60)):
            step(fixed, [walker])
        for layer in LAYERS:
            whole = fixed.table[1, layer].tolist()
            assert [{row for row in head if row >= 0} for head in whole] == walker.attended(layer)
