"""Rows moved between arena, pool and new keys and values, against plain loops and the store's own layout."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.kernels.rows import (
    ArenaLayout,
    arena_offsets,
    fetch_misses,
    gather_pairs,
    gather_rows,
    pool_rows,
    scatter_pairs,
    scatter_rows,
    store_token,
)
from kv_store.client.layout import Layout, SlabGeometry

NUM_HEADS, NUM_SLABS = 3, 5


def geometry() -> SlabGeometry:
    # Slabs of 4 tokens, and bytes to spare in each.
    return SlabGeometry(Layout(num_layers=1, num_kv_heads=NUM_HEADS, head_dim=8), 4 * NUM_HEADS * 32 + 48)


def layout() -> ArenaLayout:
    cut = geometry()
    return ArenaLayout(cut.slab_bytes, cut.tokens_per_slab, cut.layout.row_bytes)


def test_offsets_are_where_the_store_has_the_rows() -> None:
    cut = geometry()
    arena = np.random.default_rng(0).integers(0, 256, NUM_SLABS * cut.slab_bytes, dtype=np.uint8)
    slab_table = torch.tensor([[2, -1, 0, NUM_SLABS], [4, 1, 3, -1]], dtype=torch.int32)
    seats = torch.tensor([1, 0, 1])
    positions = torch.tensor([0, 3, 4, 5, 11, 12, 15, 16, -1, 999]).expand(3, NUM_HEADS, 10)
    offsets = arena_offsets(layout(), NUM_SLABS, slab_table, seats, positions)
    rows = cut.rows(arena)
    for (row, head, column), offset in np.ndenumerate(offsets.numpy()):
        position = int(positions[row, head, column])
        index = position // cut.tokens_per_slab
        slab = int(slab_table[seats[row], index]) if 0 <= index < 4 else -1
        if not 0 <= slab < NUM_SLABS:
            assert offset == -1
        else:
            there = arena[offset : offset + cut.layout.row_bytes]
            assert (there == rows[slab, head, position % cut.tokens_per_slab]).all()


def test_pairs_there_and_back() -> None:
    torch.manual_seed(0)
    arena = torch.zeros(20 * 32, dtype=torch.uint8)
    keys, values = torch.randn(2, 2, 3, 8).bfloat16()
    offsets = torch.tensor([[64, -1, 0], [32, 20 * 32 - 32, 20 * 32 - 16]])
    scatter_pairs(arena, offsets, keys, values)
    assert torch.equal(arena[64:96].view(torch.bfloat16), torch.cat([keys[0, 0], values[0, 0]]))
    assert (arena[96 : 20 * 32 - 32] == 0).all()
    again = torch.full_like(keys, 7.0), torch.full_like(values, 8.0)
    gather_pairs(arena, offsets, *again)
    skipped = torch.tensor([[False, True, False], [False, False, True]])
    assert torch.equal(again[0], keys.masked_fill(skipped[..., None], 7.0))
    assert torch.equal(again[1], values.masked_fill(skipped[..., None], 8.0))


def test_rows_there_and_back() -> None:
    torch.manual_seed(2)
    # The arena ends within a row, and rows begin at any multiple of 16 bytes.
    arena = torch.zeros(20 * 32 + 20, dtype=torch.uint8)
    pool = torch.randn(6, 16).bfloat16()
    offsets, slots = torch.tensor([48, -1, 128, 20 * 32]), torch.tensor([5, 0, -1, 1], dtype=torch.int32)
    scatter_rows(arena, offsets, pool, slots)
    assert torch.equal(arena[48:80].view(torch.bfloat16), pool[5])
    assert int(arena.count_nonzero()) == int(arena[48:80].count_nonzero())
    gather_rows(arena, torch.tensor([48, 16]), pool, torch.tensor([2, 3]))
    assert torch.equal(pool[2], pool[5])
    assert torch.equal(pool[3], torch.zeros(16))


def test_new_tokens_go_to_the_pool_and_to_the_arena() -> None:
    torch.manual_seed(3)
    keys, values = torch.randn(2, 2, 2, 8).bfloat16()
    pool, arena = torch.zeros(9, 16, dtype=torch.bfloat16), torch.zeros(5 * 32, dtype=torch.uint8)
    slots = torch.tensor([[3, -1], [8, 0]], dtype=torch.int32)
    offsets = torch.tensor([[-1, 32], [96, 0]])
    expected = torch.zeros_like(pool)
    for row, head, slot in (0, 0, 3), (1, 0, 8), (1, 1, 0):
        expected[slot] = torch.cat([keys[row, head], values[row, head]])
    store_token(keys, values, pool, slots)
    assert torch.equal(pool, expected)
    pool.zero_()
    store_token(keys, values, pool, slots, arena, offsets)
    assert torch.equal(pool, expected)
    in_arena = torch.zeros(5, 16, dtype=torch.bfloat16)
    for row, head, place in (0, 1, 1), (1, 0, 3), (1, 1, 0):
        in_arena[place] = torch.cat([keys[row, head], values[row, head]])
    assert torch.equal(arena.view(torch.bfloat16).view(5, 16), in_arena)


def test_misses_are_fetched_into_their_slots() -> None:
    torch.manual_seed(1)
    cut, spot = geometry(), layout()
    arena = torch.randint(0, 256, (NUM_SLABS * cut.slab_bytes,), dtype=torch.uint8)
    slab_table = torch.tensor([[2, 4, -1]], dtype=torch.int32)
    block_tables = torch.tensor([[[1, 5], [0, 3], [4, 2]]])
    required = torch.tensor([6, 1, -1, 9, 2]).expand(1, NUM_HEADS, 5)
    slots = torch.tensor([70, 3, -1, 64, 63]).expand(1, NUM_HEADS, 5)
    missed = torch.tensor([True, False, False, True, True]).expand(1, NUM_HEADS, 5)
    pool = torch.zeros(6 * 64, 16, dtype=torch.bfloat16)
    seats = torch.tensor([0])
    found, fetched = torch.zeros(1, NUM_HEADS, 5, dtype=torch.int32), torch.tensor([40])
    translated = torch.zeros_like(found)
    fetch_misses(arena, spot, slab_table, block_tables, seats, required, slots, missed, pool, found, fetched)
    pool_rows(block_tables, seats, slots, translated)
    assert torch.equal(found, translated)
    assert fetched.tolist() == [40 + 2 * NUM_HEADS]
    assert found[0, 0].tolist() == [5 * 64 + 6, 64 + 3, -1, 5 * 64, 64 + 63]
    rows = cut.rows(arena.numpy())
    expected = torch.zeros_like(pool).view(torch.uint8)
    for head in range(NUM_HEADS):
        # Position 9 is in no slab, so its slot keeps what it had.
        expected[found[0, head, 0]] = torch.from_numpy(rows[4, head, 2])
        expected[found[0, head, 4]] = torch.from_numpy(rows[2, head, 2])
    assert torch.equal(pool.view(torch.uint8), expected)
