"""Kept rows of several layers lie in the slots of their heads, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_worker.caches.retain.kept_rows import KeptRows
from gpu_worker.caches.retain.kept_slots import KeptSlots
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.retain import Retained
from gpu_worker.state.block_tables import BlockTables, physical_slots
from gpu_worker.state.slot_pool import SlotPool, num_blocks
from kv_store.client import RowFormat

NUM_HEADS, HEAD_DIM, SEAT, LAYERS = 2, 4, 1, range(1, 3)
SHAPE = CacheShape(3, 3, NUM_HEADS, 1, RowFormat(HEAD_DIM, "fp32"), 512, 0.5, torch.device("cpu"))


def retained(counts: list[int], width: int) -> Retained:
    every = torch.arange(width).expand(len(counts), -1)
    positions = every.where(every < torch.tensor(counts)[:, None], -1)
    keys, values = torch.rand(2, len(counts), width, HEAD_DIM)
    return Retained(positions, keys, values)


@pytest.mark.parametrize("counts", [[70, 70, 70, 70], [0, 64, 130, 1], [130, 1, 3, 0], [2, 2, 2, 2]])
@pytest.mark.parametrize("padding", [0, 3])
def test_unequal_heads_of_several_layers_are_written_where_they_belong(
    counts: list[int], padding: int
) -> None:
    pool = SlotPool(20, SHAPE.row_format, torch.device("cpu"))
    pool.rows.fill_(-1.0)
    tables = BlockTables(pool, 3, 3, NUM_HEADS, 512)
    # Blocks that nobody was dealt are in no table.
    tables.tables.fill_(1 << 30)
    for layer, of_layer in zip(LAYERS, (counts[:NUM_HEADS], counts[NUM_HEADS:]), strict=True):
        tables.reserve(SEAT, layer, 8)
        tables.deal(SEAT, layer, [num_blocks(count) for count in of_layer])
    kept = retained(counts, max(counts) + padding)
    slots = KeptSlots(pool, SHAPE)
    slots.make_room(SEAT, max(counts) + padding, has_notes=False)
    rows = KeptRows(SHAPE, pool, tables, slots)
    rows.write(SEAT, LAYERS, kept, room=2)
    expected = torch.full_like(pool.rows, -1.0)
    for head, count in enumerate(counts):
        table = tables.tables[SEAT, LAYERS[head // NUM_HEADS], head % NUM_HEADS]
        places = physical_slots(table, torch.arange(count))
        expected[places] = torch.cat([kept.keys[head, :count], kept.values[head, :count]], dim=-1)
    assert torch.equal(pool.rows, expected)
    assert (expected[:, 0] >= 0).sum() == sum(counts)


@pytest.mark.parametrize("of_keys", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_values", [torch.bfloat16, torch.float32])
def test_keys_and_values_take_the_pools_type_each_by_itself(
    of_keys: torch.dtype, of_values: torch.dtype
) -> None:
    pool = SlotPool(6, RowFormat(HEAD_DIM), torch.device("cpu"))
    tables, slots, kept = BlockTables(pool, 3, 3, NUM_HEADS, 512), KeptSlots(pool, SHAPE), retained([2, 2], 2)
    tables.assign(SEAT, 2)
    slots.make_room(SEAT, 2, has_notes=False)
    mixed = replace(kept, keys=kept.keys.to(of_keys), values=kept.values.to(of_values))
    KeptRows(SHAPE, pool, tables, slots).write(SEAT, range(1, 2), mixed, room=0)
    places = physical_slots(tables.tables[SEAT, 1], torch.arange(2).expand(NUM_HEADS, -1))
    assert torch.equal(pool.rows[places], torch.cat([kept.keys, kept.values], dim=-1).bfloat16())
