"""PQCache's own cache: hits counted by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.hitrate.block_cache import BlockCache, block_cache_hits, most_selected
from benchmarks.hitrate.cached_request import CachedRequest

NUM_SINK = 2
# Blocks of the four positions that two heads select at each step: block 0 twice, then 1, then 2, then most of 0 again.
STEPS = [[0, 0, 0, 1], [0, 0, 0, 1], [0, 1, 1, 1], [1, 2, 2, 2], [0, 0, 1, 2]]


def request(window_begins: Sequence[int]) -> CachedRequest:
    return CachedRequest(600, 620, NUM_SINK, 30, 2, tuple(window_begins))


def in_blocks(steps: Sequence[Sequence[int]]) -> Tensor:
    """Positions of one layer and sequence, two of each of the two heads: int32 [steps, 1, 1, 2, 2]."""
    within = torch.tensor([5, 127, 0, 64])
    return (NUM_SINK + 128 * torch.tensor(steps) + within).int().view(-1, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("eviction", "k_cache", "hits"),
    [
        # Block 0 was used twice and stays when 2 comes, though 1 was used later.
        ("lfu", 1, [0, 3 / 4, 1 / 4, 1 / 4, 3 / 4]),
        ("lru", 1, [0, 3 / 4, 1 / 4, 1 / 4, 2 / 4]),
        # Block 2 takes the place of 1, which takes one back: of 2 by LFU, of 0 by LRU.
        ("lfu", 2, [0, 1, 1, 1 / 4, 3 / 4]),
        ("lru", 2, [0, 1, 1, 1 / 4, 2 / 4]),
    ],
)
def test_blocks_serve_from_the_next_step_on(eviction: str, k_cache: int, hits: list[float]) -> None:
    found = block_cache_hits(in_blocks(STEPS), request([500] * 5), eviction, 2, k_cache)
    assert found.tokens.tolist() == pytest.approx(hits)
    assert found.held_tokens == 256
    assert found.clusters is None


def test_a_cache_of_more_blocks_keeps_all_that_came() -> None:
    found = block_cache_hits(in_blocks(STEPS), request([500] * 5), "lru", 3, 1)
    assert found.tokens.tolist() == pytest.approx([0, 3 / 4, 1 / 4, 1 / 4, 1])
    assert found.held_tokens == 384


def test_a_block_is_cached_once_the_window_has_left_all_of_it() -> None:
    # Block 3 ends at 2 + 4 * 128 = 514.
    positions = in_blocks([[3, 3, 3, 3]] * 4)
    found = block_cache_hits(positions, request([512, 513, 514, 515]), "lfu", 2, 1)
    assert found.tokens.tolist() == [0, 0, 0, 1]


def test_an_incomplete_block_takes_no_place_of_a_complete_one() -> None:
    positions = in_blocks([[3, 3, 3, 1]] * 2)
    assert block_cache_hits(positions, request([513, 513]), "lfu", 2, 1).tokens.tolist() == [0, 1 / 4]


def test_each_layer_and_sequence_has_a_cache_of_its_own() -> None:
    one, other = in_blocks(STEPS), in_blocks([[2, 2, 2, 2]] * 5)
    positions = torch.cat([torch.cat([one, other], dim=1), torch.cat([other, other], dim=1)], dim=2)
    found = block_cache_hits(positions, request([500] * 5), "lfu", 2, 1)
    expected = [(hit + 3 * (step > 0)) / 4 for step, hit in enumerate([0, 3 / 4, 1 / 4, 1 / 4, 3 / 4])]
    assert found.tokens.tolist() == pytest.approx(expected)
    assert found.held_tokens == (256 + 3 * 128) / 4


def test_the_most_selected_come_first_and_what_is_not_selected_never() -> None:
    counts = np.array([2, 0, 3, 2])
    assert [most_selected(counts, k) for k in (1, 2, 4)] == [[2], [2, 3], [2, 3, 0]]
    assert most_selected(counts[:0], 3) == []


def test_what_is_evicted_is_forgotten() -> None:
    cache = BlockCache(2, "lfu")
    cache.insert([7, 7, 8, 9])
    assert sorted(cache.blocks) == [7, 9]
    # 7 leads by one use: 8 comes anew and takes the place of 9
    cache.insert([8])
    assert sorted(cache.blocks) == [7, 8]
    cache.insert([8, 8, 9])
    assert sorted(cache.blocks) == [8, 9]
