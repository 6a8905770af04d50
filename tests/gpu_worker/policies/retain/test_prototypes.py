"""Prototypes: chunks, hash buckets, and the nearest of them, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker.policies.retain import prototypes
from gpu_worker.policies.retain.prototypes import (
    RandomFeatures,
    bucket_sums,
    chunk_sums,
    group_means,
    irregularity,
    nearest_prototype,
)


def random_keys(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def axis(index: int, dim: int = 4) -> Tensor:
    return torch.eye(dim)[index]


def test_two_groups_that_lie_far_apart_cluster_as_constructed() -> None:
    """The first chunk is all of one kind, the second of the other; strays go to their own kind, wherever they are."""
    kinds = torch.tensor([0] * 9 + [1] * 10 + [0, 0])
    keys = 10 * torch.eye(4)[kinds] + 0.5 * random_keys(21, 4)
    kinds[3], keys[3] = 1, keys[12]
    heads = torch.stack([keys, -keys])
    labels = nearest_prototype(heads, chunk_sums(heads, num_chunks=2))
    assert labels.tolist() == [kinds.tolist()] * 2


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


def test_an_empty_group_never_wins() -> None:
    """Its cosine of 0 is higher than that with every other prototype."""
    sums = torch.stack([-axis(0), torch.zeros(4), -3 * axis(1), torch.zeros(4)])[None]
    keys = torch.stack([axis(0) + 2 * axis(1), 2 * axis(0) + axis(1)])[None]
    assert nearest_prototype(keys, sums).tolist() == [[0, 2]]


def test_a_prototypes_length_does_not_matter() -> None:
    sums = torch.stack([axis(0), 100 * (axis(0) + axis(1))])[None]
    keys = torch.stack([axis(0), 0.01 * axis(0), axis(0) + axis(1)])[None]
    assert nearest_prototype(keys, sums).tolist() == [[0, 0, 1]]


def test_a_bucket_is_the_number_that_the_signs_spell() -> None:
    """Phase 0: cos 0 > 0 is a one. A key along axis i turns bit i by half a circle. The first bit counts most."""
    weights = math.pi * torch.eye(3)[None]
    features = RandomFeatures(weights, torch.zeros(1, 1, 3), num_buckets=8)
    keys = torch.stack([torch.zeros(3), axis(0, 3), axis(1, 3), 7 * axis(2, 3)])[None]
    assert features.buckets(keys).tolist() == [[0b111, 0b011, 0b101, 0b110]]
    fewer = RandomFeatures(weights, torch.zeros(1, 1, 3), num_buckets=5)
    assert fewer.buckets(keys).tolist() == [[2, 3, 0, 1]]


def test_phases_turn_the_bits_too() -> None:
    features = RandomFeatures(torch.zeros(1, 3, 2), torch.tensor([[[math.pi, 0.0]]]), num_buckets=4)
    assert features.buckets(random_keys(1, 5, 3)).tolist() == [[1] * 5]


def test_bucket_sums_are_the_sums_of_their_keys() -> None:
    keys = random_keys(2, 30, 5)
    features = RandomFeatures.draw(keys, num_buckets=6, gamma=1.0, seed=3)
    expected = torch.zeros(2, 6, 5)
    for head, buckets in enumerate(features.buckets(keys).tolist()):
        for token, bucket in enumerate(buckets):
            expected[head, bucket] += keys[head, token]
    torch.testing.assert_close(bucket_sums(keys, features), expected)


def test_features_are_a_heads_own_and_the_seeds() -> None:
    keys = random_keys(3, 1, 64)
    features = [
        RandomFeatures.draw(keys, 16, gamma, seed) for gamma, seed in [(1, 5), (1, 5), (2, 5), (1, 6)]
    ]
    first, same, wider, other = (each.weights for each in features)
    assert first.shape == (3, 64, 4)
    assert torch.equal(first, same)
    assert torch.equal(features[0].phases, features[1].phases)
    assert torch.equal(wider, 2 * first)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert 0.9 < first.std() < 1.1
    phases = RandomFeatures.draw(keys, 2**40, 1, 0).phases
    assert 0 <= phases.min() < 1
    assert 5 < phases.max() < 2 * math.pi


def test_similar_keys_share_more_bits_than_unrelated_ones() -> None:
    """PK-A5: by direction at gamma 1, whatever their length."""
    keys = 15 * random_keys(1, 400, 128)
    near = 0.9 * keys + math.sqrt(1 - 0.81) * 15 * random_keys(1, 400, 128, seed=1)
    agree = [
        sum(
            (draw.buckets(keys) == draw.buckets(others)).float().mean().item() / 40
            for draw in (RandomFeatures.draw(keys, 2, 1.0, seed) for seed in range(40))
        )
        for others in (7 * near, keys.roll(1, dims=1))
    ]
    assert agree[0] > 0.85
    assert agree[1] < 0.72


def test_group_means_by_hand() -> None:
    votes = torch.tensor([[1.0, 2, 6, 0.5], [4, 3, 2, 1]])
    labels = torch.tensor([[0, 2, 0, 2], [1, 1, 1, 0]])
    means = group_means(votes, labels, num_groups=3)
    torch.testing.assert_close(means, torch.tensor([[3.5, 1.25, 3.5, 1.25], [3, 3, 3, 1]]))


def test_group_means_do_not_depend_on_the_order_of_tokens() -> None:
    votes = random_keys(1, 5000).softmax(dim=1)
    labels = torch.arange(5000)[None] % 7
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    means = group_means(votes, labels, 7)
    assert torch.equal(group_means(votes[:, order], labels[:, order], 7), means[:, order])
    expected = torch.stack([votes[labels == group].double().mean() for group in range(7)])
    torch.testing.assert_close(means[0, :7].double(), expected, rtol=1e-6, atol=0)


def test_small_votes_keep_their_mean() -> None:
    votes = torch.full((1, 10), 3e-9)
    means = group_means(votes, torch.zeros(1, 10, dtype=torch.int64), 1)
    torch.testing.assert_close(means, votes, rtol=1e-5, atol=0)


@pytest.mark.parametrize("max_elements", [1, 40, 100, 333])
def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch, max_elements: int) -> None:
    keys = random_keys(2, 57, 4)
    is_member = random_keys(2, 57) > 0

    def everything() -> list[Tensor]:
        features = RandomFeatures.draw(keys, 6, 1.0, 0)
        sums = chunk_sums(keys, 5, is_member)
        nearest = nearest_prototype(keys, sums)
        return [irregularity(keys, 5), sums, bucket_sums(keys, features), nearest]

    whole = everything()
    monkeypatch.setattr(prototypes, "MAX_ELEMENTS", max_elements)
    for tiled, untiled in zip(everything(), whole, strict=True):
        torch.testing.assert_close(tiled, untiled)


def test_zero_keys_give_no_nan() -> None:
    keys = torch.zeros(2, 30, 4)
    features = RandomFeatures.draw(keys, 4, 1.0, 0)
    assert (irregularity(keys, 3) == 0).all()
    sums = torch.cat([chunk_sums(keys, 3), bucket_sums(keys, features)], dim=1)
    assert (sums == 0).all()
    assert (nearest_prototype(keys, sums) == 0).all()
