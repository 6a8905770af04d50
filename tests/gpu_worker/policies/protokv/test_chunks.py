"""Chunks of keys that are unusual, or too many for one tile. All else is in the table of kernels."""

from __future__ import annotations

import math

import pytest
import torch
from operations.groups import themes

from gpu_worker.policies.protokv.chunks import reference

kernel = pytest.importorskip("gpu_worker.policies.protokv.chunks.kernel")


@pytest.mark.parametrize("max_elements", [1, 40, 333])
def test_tiles_of_the_reference_change_nothing(monkeypatch: pytest.MonkeyPatch, max_elements: int) -> None:
    keys = themes(2, 57, 4, 5)["keys"]
    is_member = torch.arange(57).expand(2, -1) % 3 > 0
    whole = reference.irregularity(keys, 5), reference.chunk_sums(keys, 5, is_member)
    monkeypatch.setattr(reference, "MAX_ELEMENTS", max_elements)
    torch.testing.assert_close(reference.irregularity(keys, 5), whole[0])
    torch.testing.assert_close(reference.chunk_sums(keys, 5, is_member), whole[1])


def test_equal_keys_are_not_irregular_by_rounding(device: torch.device) -> None:
    keys = themes(1, 100, 64, 2)["keys"].to(device)
    keys[:, :50] = 15.3 * keys[:, :1]
    for module in kernel, reference:
        scores = module.irregularity(keys, 2)[0]
        assert scores[:50].max() < 0.01 * scores[50:].min()


def test_zero_keys_and_keys_that_are_no_numbers_give_no_nan(device: torch.device) -> None:
    keys = torch.zeros(2, 30, 16, device=device)
    keys[1, 10:] = themes(1, 20, 16, 1)["keys"][0].to(device)
    keys[1, 3], keys[1, 5] = math.nan, math.inf
    for module in kernel, reference:
        scores = module.irregularity(keys, 3)
        assert (scores[0] == 0).all()
        assert (scores[1, :10] == 0).all()
        assert (scores[1, 10:] > 0).all()


@pytest.mark.gpu
def test_rows_beyond_32_bits(device: torch.device) -> None:
    """More than 2^31 elements of rows: the last head's lie behind them."""
    if device.type == "cpu":
        pytest.skip("takes gigabytes")
    rows = torch.zeros(3, 1 << 22, 256, dtype=torch.bfloat16, device=device)
    keys, num_chunks = rows[:, :, :128], 1 << 16
    keys[2] = torch.randn(1 << 22, 128, device=device)
    last = keys[2:].float().unflatten(1, (num_chunks, -1)).sum(2)
    torch.testing.assert_close(kernel.chunk_sums(keys, num_chunks)[2:], last, atol=1e-3, rtol=1e-4)
    assert torch.equal(kernel.irregularity(keys, num_chunks)[2:], kernel.irregularity(keys[2:], num_chunks))
