"""Sums of hash buckets, by kernel and reference, against loops; and the buckets by hand."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_rig import amid_nan
from torch import Tensor

from gpu_worker.policies.protokv.hash_buckets import RandomFeatures, reference

kernel = pytest.importorskip("gpu_worker.policies.protokv.hash_buckets.kernel")


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


def keys_of(
    device: torch.device, num_heads: int, num_rows: int, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A part of rows that are NaN beyond it."""
    return amid_nan(
        random_keys(num_heads, num_rows, width, seed=num_rows + width).to(device, dtype), beside=width
    )


def check(keys: Tensor, features: RandomFeatures) -> None:
    expected = torch.zeros(keys.shape[0], features.num_buckets, keys.shape[2], device=keys.device)
    for head, buckets in enumerate(features.buckets(keys.float()).tolist()):
        for token, bucket in enumerate(buckets):
            expected[head, bucket] += keys[head, token]
    for module in kernel, reference:
        found = module.bucket_sums(keys, features)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(5, torch.float32), (64, torch.bfloat16), (96, torch.float16), (128, torch.float32)],
)
def test_widths_and_types(device: torch.device, dtype: torch.dtype, width: int) -> None:
    keys = keys_of(device, 2, 48, width, dtype)
    check(keys, RandomFeatures.draw(keys, 16, 1.0, 3))


@pytest.mark.parametrize(("num_rows", "num_buckets"), [(0, 5), (1, 1), (3, 16), (70, 2), (20, 33)])
def test_numbers_of_keys_and_buckets(device: torch.device, num_rows: int, num_buckets: int) -> None:
    keys = keys_of(device, 3, num_rows, 16)
    check(keys, RandomFeatures.draw(keys, num_buckets, 2.0, num_rows))


def test_several_tiles_of_keys(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE_ELEMENTS", 256)
    keys = keys_of(device, 2, 50, 16)
    check(keys, RandomFeatures.draw(keys, 6, 1.0, 0))


@pytest.mark.parametrize("max_elements", [1, 40, 100, 333])
def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch, max_elements: int) -> None:
    keys = random_keys(2, 57, 4)
    features = RandomFeatures.draw(keys, 6, 1.0, 0)
    features = RandomFeatures.draw(keys, 6, 1.0, 0)
    whole = reference.bucket_sums(keys, features)
    monkeypatch.setattr(reference, "MAX_ELEMENTS", max_elements)
    torch.testing.assert_close(reference.bucket_sums(keys, features), whole)


def test_weights_and_phases_of_any_layout(device: torch.device) -> None:
    """As one copy brings them: phases behind the weights of each head."""
    keys = keys_of(device, 2, 40, 16)
    features = RandomFeatures.draw(keys, 8, 1.0, 0)
    both = torch.cat([features.weights, features.phases], dim=1)
    apart = RandomFeatures(features.weights.mT.contiguous().mT, features.phases, 8)
    joined = RandomFeatures(both[:, :16], both[:, 16:], 8)
    assert torch.equal(kernel.bucket_sums(keys, joined), kernel.bucket_sums(keys, features))
    assert torch.equal(kernel.bucket_sums(keys, apart), kernel.bucket_sums(keys, features))


def test_zero_keys_give_no_nan(device: torch.device) -> None:
    keys = torch.zeros(2, 30, 16, device=device)
    assert (kernel.bucket_sums(keys, RandomFeatures.draw(keys, 4, 1.0, 0)) == 0).all()


def test_many_keys_go_to_the_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MOST_HASHES", 100)
    keys = keys_of(device, 2, 30, 16)
    features = RandomFeatures.draw(keys, 4, 1.0, 0)
    assert torch.equal(kernel.bucket_sums(keys, features), reference.bucket_sums(keys, features))


def test_features_are_the_same_on_every_device(device: torch.device) -> None:
    keys = torch.zeros(2, 3, 16, device=device)
    here, there = (RandomFeatures.draw(of, 16, 1.0, 5) for of in (keys, keys.cpu()))
    assert torch.equal(here.weights.cpu(), there.weights)
    assert torch.equal(here.phases.cpu(), there.phases)
