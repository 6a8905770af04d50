"""Kernels over chunks against their references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.policies.protokv.chunks import reference
from gpu_worker.policies.protokv.chunks.kernel import chunk_sums, irregularity


def keys_of(device: torch.device, num_heads: int, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """The keys half of rows K|V, a part of a longer context; all else is NaN."""
    generator = torch.Generator().manual_seed(num_rows + width)
    rows = torch.full((num_heads, num_rows + 3, 2 * width), math.nan)
    themes = torch.randn(num_heads, num_rows // 10 + 1, width, generator=generator)
    noise = torch.randn(num_heads, num_rows, width, generator=generator)
    rows[:, 1:-2, :width] = 3 * themes[:, torch.arange(num_rows) // 10] + noise
    return rows.to(device, dtype)[:, 1:-2, :width]


def check(keys: Tensor, num_chunks: int) -> None:
    """Scores, and sums of all, of some and of no keys."""
    found = irregularity(keys, num_chunks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference.irregularity(keys, num_chunks), atol=1e-5, rtol=1e-4)
    is_member = torch.randn(keys.shape[:2], generator=torch.Generator().manual_seed(0)).to(keys.device) > -1
    is_member[0, : keys.shape[1] // num_chunks] = False
    wide = torch.ones(keys.shape[0], keys.shape[1] + 5, dtype=torch.bool, device=keys.device)
    wide[:, 2:-3] = is_member
    for members in None, is_member, wide[:, 2:-3]:
        sums = chunk_sums(keys, num_chunks, members)
        assert sums.dtype == torch.float32
        torch.testing.assert_close(
            sums, reference.chunk_sums(keys, num_chunks, members), atol=1e-3, rtol=1e-5
        )
    assert (sums[0, 0] == 0).all()


@pytest.mark.parametrize(
    ("width", "dtype"), [(5, torch.float32), (64, torch.float16), (96, torch.float32), (128, torch.bfloat16)]
)
def test_widths_and_types(device: torch.device, dtype: torch.dtype, width: int) -> None:
    check(keys_of(device, 2, 117, width, dtype), num_chunks=2)


@pytest.mark.parametrize(
    ("num_rows", "num_chunks"),
    [(1, 1), (7, 7), (7, 4), (64, 1), (65, 1), (199, 100), (260, 3)],
)
def test_lengths_of_chunks(device: torch.device, num_rows: int, num_chunks: int) -> None:
    """Of one key, less than a tile, a whole one, several; and the last with a rest of none up to the most."""
    check(keys_of(device, 3, num_rows, 16, torch.float32), num_chunks)


def test_the_last_chunk_may_be_many_tiles_long(device: torch.device) -> None:
    check(keys_of(device, 2, 149, 16, torch.bfloat16), num_chunks=75)
    check(keys_of(device, 1, 3 * 90 - 1, 16, torch.bfloat16), num_chunks=90)


def test_wide_keys(device: torch.device) -> None:
    check(keys_of(device, 1, 90, 600, torch.float32), num_chunks=2)


def test_equal_keys_are_not_irregular_by_rounding(device: torch.device) -> None:
    keys = keys_of(device, 1, 100, 64, torch.float32).clone()
    keys[:, :50] = 15.3 * keys[:, :1]
    scores = irregularity(keys, num_chunks=2)[0]
    assert scores[:50].max() < 0.01 * scores[50:].min()


def test_zero_keys_and_keys_that_are_no_numbers_give_no_nan(device: torch.device) -> None:
    keys = torch.zeros(2, 30, 16, device=device)
    keys[1, 10:] = keys_of(device, 1, 20, 16, torch.float32)[0]
    keys[1, 3], keys[1, 5] = math.nan, math.inf
    torch.testing.assert_close(irregularity(keys, 3), reference.irregularity(keys, 3), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num_chunks", [0, 8])
def test_a_chunk_has_at_least_one_key(device: torch.device, num_chunks: int) -> None:
    for make in irregularity, chunk_sums:
        with pytest.raises(ValueError, match=f"7 keys make no {num_chunks} chunks"):
            make(torch.zeros(1, 7, 4, device=device), num_chunks)


def test_no_heads_are_no_error(device: torch.device) -> None:
    keys = torch.zeros(0, 7, 16, device=device)
    assert irregularity(keys, 2).shape == (0, 7)
    assert chunk_sums(keys, 2).shape == (0, 2, 16)


@pytest.mark.gpu
def test_rows_beyond_32_bits(device: torch.device) -> None:
    """More than 2^31 elements of rows: the last head's lie behind them."""
    if device.type == "cpu":
        pytest.skip("takes gigabytes")
    rows = torch.zeros(3, 1 << 22, 256, dtype=torch.bfloat16, device=device)
    keys, num_chunks = rows[:, :, :128], 1 << 16
    keys[2] = torch.randn(1 << 22, 128, device=device)
    last = keys[2:].float().unflatten(1, (num_chunks, -1)).sum(2)
    torch.testing.assert_close(chunk_sums(keys, num_chunks)[2:], last, atol=1e-3, rtol=1e-4)
    assert torch.equal(irregularity(keys, num_chunks)[2:], irregularity(keys[2:], num_chunks))
