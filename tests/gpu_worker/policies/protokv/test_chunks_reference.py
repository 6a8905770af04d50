"""Chunks by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker.policies.protokv.chunks import chunk_sums, irregularity, reference


def random_keys(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_last_chunk_takes_the_rest() -> None:
    keys = random_keys(2, 11, 3)
    sums = chunk_sums(keys, num_chunks=3)
    expected = torch.stack([keys[:, :3].sum(1), keys[:, 3:6].sum(1), keys[:, 6:].sum(1)], dim=1)
    torch.testing.assert_close(sums, expected)


def test_only_members_count_in_a_chunk() -> None:
    keys = random_keys(1, 6, 3)
    is_member = torch.tensor([[True, False, False, True, False, False]])
    sums = chunk_sums(keys, 3, is_member)
    assert torch.equal(sums[0], torch.stack([keys[0, 0], keys[0, 3], torch.zeros(3)]))


def test_irregularity_is_the_turn_away_from_the_mean_over_the_spread() -> None:
    """A chunk of (1, 0) three times and (0, 1): the mean is (3, 1) / 4, each channel's variance 3 / 16. Then the same
    three times as long, with three times the spread."""
    chunk = torch.tensor([[1.0, 0], [1, 0], [0, 1], [1, 0]])
    scores = irregularity(torch.cat([chunk, 3 * chunk])[None], num_chunks=2)[0]
    with_many, alone = 1 - 3 / math.sqrt(10), 1 - 1 / math.sqrt(10)
    expected = torch.tensor([with_many, with_many, alone, with_many]) / math.sqrt(6 / 16)
    torch.testing.assert_close(scores, torch.cat([expected, expected / 3]))


def test_equal_keys_are_not_irregular_by_rounding() -> None:
    equal = (15.3 * random_keys(1, 1, 64)).expand(1, 50, 64)
    varied = equal + random_keys(1, 50, 64, seed=1)
    scores = irregularity(torch.cat([equal, varied], dim=1), num_chunks=2)[0]
    assert scores[:50].max() < 0.01 * scores[50:].min()


@pytest.mark.parametrize("max_elements", [1, 40, 100, 333])
def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch, max_elements: int) -> None:
    keys, is_member = random_keys(2, 57, 4), random_keys(2, 57) > 0
    whole = irregularity(keys, 5), chunk_sums(keys, 5, is_member)
    monkeypatch.setattr(reference, "MAX_ELEMENTS", max_elements)
    torch.testing.assert_close(irregularity(keys, 5), whole[0])
    torch.testing.assert_close(chunk_sums(keys, 5, is_member), whole[1])


def test_zero_keys_and_keys_that_are_no_numbers_give_no_nan() -> None:
    keys = torch.zeros(2, 30, 4)
    keys[1, 7:] = random_keys(23, 4)
    keys[1, 3] = math.nan
    scores = irregularity(keys, 3)
    assert (scores[0] == 0).all()
    assert (scores[1, :10] == 0).all()
    assert (scores[1, 10:] > 0).all()


@pytest.mark.parametrize("num_chunks", [0, 8])
def test_a_chunk_has_at_least_one_key(num_chunks: int) -> None:
    for make in irregularity, chunk_sums:
        with pytest.raises(ValueError, match=f"7 keys make no {num_chunks} chunks"):
            make(random_keys(1, 7, 4), num_chunks)
