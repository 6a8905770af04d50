"""Hash buckets by hand. Their sums are in the table of kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker.policies.protokv.hash_buckets import RandomFeatures, reference


def random_keys(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_bucket_is_the_number_that_the_signs_spell() -> None:
    """Phase 0: cos 0 > 0 is a one. A key along axis i turns bit i by half a circle. The first bit counts most."""
    weights = math.pi * torch.eye(3)[None]
    features = RandomFeatures(weights, torch.zeros(1, 1, 3), num_buckets=8)
    keys = torch.cat([torch.zeros(1, 3), torch.diag(torch.tensor([1.0, 1, 7]))])[None]
    assert features.buckets(keys).tolist() == [[0b111, 0b011, 0b101, 0b110]]
    fewer = RandomFeatures(weights, torch.zeros(1, 1, 3), num_buckets=5)
    assert fewer.buckets(keys).tolist() == [[2, 3, 0, 1]]


def test_phases_turn_the_bits_too() -> None:
    features = RandomFeatures(torch.zeros(1, 3, 2), torch.tensor([[[math.pi, 0.0]]]), num_buckets=4)
    assert features.buckets(random_keys(1, 5, 3)).tolist() == [[1] * 5]


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


@pytest.mark.parametrize("max_elements", [1, 40, 100, 333])
def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch, max_elements: int) -> None:
    keys = random_keys(2, 57, 4)
    features = RandomFeatures.draw(keys, 6, 1.0, 0)
    features = RandomFeatures.draw(keys, 6, 1.0, 0)
    whole = reference.bucket_sums(keys, features)
    monkeypatch.setattr(reference, "MAX_ELEMENTS", max_elements)
    torch.testing.assert_close(reference.bucket_sums(keys, features), whole)


def test_features_are_the_same_on_every_device(device: torch.device) -> None:
    keys = torch.zeros(2, 3, 16, device=device)
    here, there = (RandomFeatures.draw(of, 16, 1.0, 5) for of in (keys, keys.cpu()))
    assert torch.equal(here.weights.cpu(), there.weights)
    assert torch.equal(here.phases.cpu(), there.phases)
