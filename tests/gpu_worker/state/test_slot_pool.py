"""Blocks of a layer, whole or dealt to its heads, and that all of them come back."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.errors import CapacityError
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.slot_pool import SlotPool, num_blocks
from kv_store.client import RowFormat

NUM_BLOCKS = 20


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(NUM_BLOCKS, RowFormat(2, "fp32"), torch.device("cpu"))


def new_tables(pool: SlotPool) -> BlockTables:
    return BlockTables(pool, num_seats=3, num_layers=2, num_kv_heads=3, max_slots=8 * 64)


def test_reserved_blocks_are_dealt_unequally_and_the_rest_is_free(pool: SlotPool) -> None:
    tables = new_tables(pool)
    tables.reserve(1, 0, 9)
    assert pool.num_free_blocks == NUM_BLOCKS - 9
    tables.deal(1, 0, [4, 0, 3])
    assert pool.num_free_blocks == NUM_BLOCKS - 7
    held = [*tables.tables[1, 0, 0, :4].tolist(), *tables.tables[1, 0, 2, :3].tolist()]
    assert len(set(held)) == 7
    other = pool.allocate(NUM_BLOCKS - 7)
    assert not set(other.tolist()) & set(held)
    tables.release(1)
    assert pool.num_free_blocks == 7


def test_what_is_kept_is_dealt_anew_and_comes_back(pool: SlotPool) -> None:
    tables = new_tables(pool)
    tables.reserve(1, 0, 9)
    for counts in ([1, 1, 6], [7, 1, 1], [2, 3, 1]):
        tables.deal(1, 0, counts, frees_rest=False)
        dealt = [tables.tables[1, 0, head, :count].tolist() for head, count in enumerate(counts)]
        assert len({block for blocks in dealt for block in blocks}) == sum(counts)
        assert pool.num_free_blocks == NUM_BLOCKS - 9
    others = pool.allocate(NUM_BLOCKS - 9)
    assert not set(others.tolist()) & {block for blocks in dealt for block in blocks}
    tables.release(1)
    assert pool.num_free_blocks == 9


def test_heads_that_have_enough_keep_their_blocks_until_the_layer_is_released(pool: SlotPool) -> None:
    tables = new_tables(pool)
    tables.reserve(1, 0, 9)
    tables.deal(1, 0, [2, 3, 4], frees_rest=False)
    dealt = tables.tables.clone()
    tables.deal(1, 0, [2, 1, 4], frees_rest=False)
    tables.deal(1, 0, [2, 3, 4], frees_rest=False)
    assert torch.equal(tables.tables, dealt)
    tables.release(1)
    others = pool.allocate(9)
    tables.reserve(1, 0, 9)
    tables.deal(1, 0, [2, 3, 4], frees_rest=False)
    held = [
        block for head, count in enumerate((2, 3, 4)) for block in tables.tables[1, 0, head, :count].tolist()
    ]
    assert not set(held) & set(others.tolist())
    assert len(set(held)) == 9


def test_an_even_share_of_every_layer_stays_where_it_lies_until_it_is_dealt_otherwise(pool: SlotPool) -> None:
    tables = new_tables(pool)
    tables.reserve(1, 0, 9)
    tables.reserve(1, 1, 8)
    tables.deal_evenly(1, [2, 1])
    shares = tables.tables.clone()
    of_layers = [shares[1, layer, :, :count].flatten().tolist() for layer, count in enumerate((2, 1))]
    assert len({block for held in of_layers for block in held}) == 9
    assert pool.num_free_blocks == NUM_BLOCKS - 17
    tables.deal(1, 0, [2, 2, 2])
    assert torch.equal(tables.tables, shares)
    assert pool.num_free_blocks == NUM_BLOCKS - 14
    tables.deal(1, 1, [0, 3, 1])
    held = [*tables.tables[1, 1, 1, :3].tolist(), *tables.tables[1, 1, 2, :1].tolist()]
    assert len({*held, *of_layers[0]}) == 10
    assert pool.num_free_blocks == NUM_BLOCKS - 10
    others = pool.allocate(NUM_BLOCKS - 10)
    assert not {*others.tolist()} & {*held, *of_layers[0]}
    tables.release(1)
    assert pool.num_free_blocks == 10


def test_what_is_reserved_and_never_dealt_comes_back(pool: SlotPool) -> None:
    tables = new_tables(pool)
    tables.reserve(0, 1, 12)
    with pytest.raises(CapacityError, match="bytes of slots are missing"):
        tables.reserve(2, 1, 9)
    tables.release(0)
    tables.release(2)
    assert pool.num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize(("slots", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_blocks_hold_64_slots(slots: int, blocks: int) -> None:
    assert num_blocks(slots) == blocks
