"""Sums of hash buckets against their reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.policies.protokv.hash_buckets import RandomFeatures, kernel, reference
from gpu_worker.policies.protokv.hash_buckets.kernel import bucket_sums


def keys_of(
    device: torch.device, num_heads: int, num_rows: int, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A part of rows that are NaN beyond it."""
    generator = torch.Generator().manual_seed(num_rows + width)
    rows = torch.full((num_heads, num_rows + 3, 2 * width), math.nan, dtype=dtype)
    rows[:, 1:-2, :width] = torch.randn(num_heads, num_rows, width, generator=generator).to(dtype)
    return rows.to(device)[:, 1:-2, :width]


def check(keys: Tensor, features: RandomFeatures) -> None:
    found, expected = bucket_sums(keys, features), reference.bucket_sums(keys, features)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found.sum(1), keys.float().sum(1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("width", "dtype"), [(5, torch.float32), (64, torch.float16), (96, torch.float32), (128, torch.bfloat16)]
)
def test_widths_and_types(device: torch.device, dtype: torch.dtype, width: int) -> None:
    keys = keys_of(device, 2, 48, width, dtype)
    check(keys, RandomFeatures.draw(keys, 16, 1.0, 3))


@pytest.mark.parametrize("num_buckets", [1, 5, 33])
@pytest.mark.parametrize("num_rows", [0, 1, 70])
def test_numbers_of_keys_and_buckets(device: torch.device, num_rows: int, num_buckets: int) -> None:
    keys = keys_of(device, 3, num_rows, 16)
    check(keys, RandomFeatures.draw(keys, num_buckets, 2.0, num_rows))


def test_several_tiles_of_keys(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE_ELEMENTS", 256)
    keys = keys_of(device, 2, 50, 16)
    check(keys, RandomFeatures.draw(keys, 6, 1.0, 0))


def test_weights_and_phases_of_any_layout(device: torch.device) -> None:
    """As one copy brings them: phases behind the weights of each head."""
    keys = keys_of(device, 2, 40, 16)
    features = RandomFeatures.draw(keys, 8, 1.0, 0)
    both = torch.cat([features.weights, features.phases], dim=1)
    apart = RandomFeatures(features.weights.mT.contiguous().mT, features.phases, 8)
    joined = RandomFeatures(both[:, :16], both[:, 16:], 8)
    assert torch.equal(bucket_sums(keys, joined), bucket_sums(keys, features))
    assert torch.equal(bucket_sums(keys, apart), bucket_sums(keys, features))


def test_zero_keys_give_no_nan(device: torch.device) -> None:
    keys = torch.zeros(2, 30, 16, device=device)
    assert (bucket_sums(keys, RandomFeatures.draw(keys, 4, 1.0, 0)) == 0).all()


def test_many_keys_go_to_the_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MOST_HASHES", 100)
    keys = keys_of(device, 2, 30, 16)
    features = RandomFeatures.draw(keys, 4, 1.0, 0)
    assert torch.equal(bucket_sums(keys, features), reference.bucket_sums(keys, features))


def test_features_are_the_same_on_every_device(device: torch.device) -> None:
    keys = torch.zeros(2, 3, 16, device=device)
    here, there = (RandomFeatures.draw(of, 16, 1.0, 5) for of in (keys, keys.cpu()))
    assert torch.equal(here.weights.cpu(), there.weights)
    assert torch.equal(here.phases.cpu(), there.phases)
