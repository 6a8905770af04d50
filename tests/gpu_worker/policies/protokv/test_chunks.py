"""Kernels over chunks against their references, and both by hand."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_rig import amid_nan
from torch import Tensor

from gpu_worker.policies.protokv.chunks import reference

kernel = pytest.importorskip("gpu_worker.policies.protokv.chunks.kernel")


def keys_of(
    device: torch.device, num_heads: int, num_rows: int, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The keys half of rows K|V, a part of a longer context; all else is NaN."""
    generator = torch.Generator().manual_seed(num_rows + width)
    themes = torch.randn(num_heads, num_rows // 10 + 1, width, generator=generator)
    noise = torch.randn(num_heads, num_rows, width, generator=generator)
    keys = 3 * themes[:, torch.arange(num_rows) // 10] + noise
    return amid_nan(keys.to(device, dtype), beside=width)


def check(keys: Tensor, num_chunks: int) -> None:
    """Scores, and sums of all, of some and of no keys."""
    found = kernel.irregularity(keys, num_chunks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference.irregularity(keys, num_chunks), atol=1e-5, rtol=1e-4)
    is_member = torch.randn(keys.shape[:2], generator=torch.Generator().manual_seed(0)).to(keys.device) > -1
    is_member[0, : keys.shape[1] // num_chunks] = False
    wide = torch.ones(keys.shape[0], keys.shape[1] + 5, dtype=torch.bool, device=keys.device)
    wide[:, 2:-3] = is_member
    for members in None, is_member, wide[:, 2:-3]:
        sums = kernel.chunk_sums(keys, num_chunks, members)
        assert sums.dtype == torch.float32
        expected = reference.chunk_sums(keys, num_chunks, members)
        torch.testing.assert_close(sums, expected, atol=1e-3, rtol=1e-5)
    assert (sums[0, 0] == 0).all()


def test_the_last_chunk_takes_the_rest_and_only_members_count(device: torch.device) -> None:
    keys = keys_of(device, 2, 11, 3)
    is_member = (torch.arange(11, device=device) % 4 != 1).expand(2, -1)
    for module in kernel, reference:
        for members, of in (None, keys), (is_member, keys * is_member[..., None]):
            expected = torch.stack([of[:, :3].sum(1), of[:, 3:6].sum(1), of[:, 6:].sum(1)], dim=1)
            torch.testing.assert_close(module.chunk_sums(keys, 3, members), expected)


def test_irregularity_is_the_turn_away_from_the_mean_over_the_spread(device: torch.device) -> None:
    """A chunk of (1, 0) three times and (0, 1): the mean is (3, 1) / 4, each channel's variance 3 / 16. Then the same
    three times as long, with three times the spread."""
    chunk = torch.tensor([[1.0, 0], [1, 0], [0, 1], [1, 0]], device=device)
    with_many, alone = 1 - 3 / math.sqrt(10), 1 - 1 / math.sqrt(10)
    expected = torch.tensor([with_many, with_many, alone, with_many], device=device) / math.sqrt(6 / 16)
    for module in kernel, reference:
        scores = module.irregularity(torch.cat([chunk, 3 * chunk])[None], 2)[0]
        torch.testing.assert_close(scores, torch.cat([expected, expected / 3]))


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (5, torch.float32),
        (64, torch.bfloat16),
        (96, torch.float16),
        (128, torch.float32),
        (600, torch.float32),
    ],
)
def test_widths_and_types(device: torch.device, dtype: torch.dtype, width: int) -> None:
    check(keys_of(device, 1, 90, width, dtype), num_chunks=2)


@pytest.mark.parametrize(
    ("num_rows", "num_chunks"),
    [(1, 1), (7, 4), (64, 1), (65, 1), (131, 66), (300, 2), (260, 3)],
)
def test_lengths_of_chunks(device: torch.device, num_rows: int, num_chunks: int) -> None:
    """Of one key, less than a tile, a whole one, several; and the last with a rest of none up to the most."""
    check(keys_of(device, 3, num_rows, 16), num_chunks)


@pytest.mark.parametrize("max_elements", [1, 40, 333])
def test_tiles_of_the_reference_change_nothing(monkeypatch: pytest.MonkeyPatch, max_elements: int) -> None:
    keys = keys_of(torch.device("cpu"), 2, 57, 4)
    is_member = torch.arange(57).expand(2, -1) % 3 > 0
    whole = reference.irregularity(keys, 5), reference.chunk_sums(keys, 5, is_member)
    monkeypatch.setattr(reference, "MAX_ELEMENTS", max_elements)
    torch.testing.assert_close(reference.irregularity(keys, 5), whole[0])
    torch.testing.assert_close(reference.chunk_sums(keys, 5, is_member), whole[1])


def test_equal_keys_are_not_irregular_by_rounding(device: torch.device) -> None:
    keys = keys_of(device, 1, 100, 64).clone()
    keys[:, :50] = 15.3 * keys[:, :1]
    for module in kernel, reference:
        scores = module.irregularity(keys, 2)[0]
        assert scores[:50].max() < 0.01 * scores[50:].min()


def test_zero_keys_and_keys_that_are_no_numbers_give_no_nan(device: torch.device) -> None:
    keys = torch.zeros(2, 30, 16, device=device)
    keys[1, 10:] = keys_of(device, 1, 20, 16)[0]
    keys[1, 3], keys[1, 5] = math.nan, math.inf
    for module in kernel, reference:
        scores = module.irregularity(keys, 3)
        assert (scores[0] == 0).all()
        assert (scores[1, :10] == 0).all()
        assert (scores[1, 10:] > 0).all()


@pytest.mark.parametrize("num_chunks", [0, 8])
def test_a_chunk_has_at_least_one_key(device: torch.device, num_chunks: int) -> None:
    for module in kernel, reference:
        for make in module.irregularity, module.chunk_sums:
            with pytest.raises(ValueError, match=f"7 keys make no {num_chunks} chunks"):
                make(torch.zeros(1, 7, 4, device=device), num_chunks)


def test_no_heads_are_no_error(device: torch.device) -> None:
    keys = torch.zeros(0, 7, 16, device=device)
    assert kernel.irregularity(keys, 2).shape == (0, 7)
    assert kernel.chunk_sums(keys, 2).shape == (0, 2, 16)


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
