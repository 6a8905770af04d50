"""Kernels of soft matching against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.policies.chelsea.soft_matching import WeightedRows, num_matches, reference
from gpu_worker.policies.chelsea.soft_matching import kernel as kernels
from gpu_worker.policies.chelsea.soft_matching.kernel import match_rows, merge_rows


def signs(num_heads: int, num_rows: int, width: int, seed: int = 0) -> Tensor:
    """Rows of ones and minus ones: cosines lie far from halves of a step, however they are summed, and many tie."""
    generator = torch.Generator().manual_seed(seed + num_rows)
    kinds = torch.randint(0, 2, (max(2, num_rows // 3), width), generator=generator) * 2.0 - 1
    return kinds[torch.randint(0, len(kinds), (num_heads, num_rows), generator=generator)]


def walk(num_heads: int, num_rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + num_rows)
    return torch.randn(num_heads, num_rows, width, generator=generator).cumsum(1)


def rows_of(
    device: torch.device, keys: Tensor, dtype: torch.dtype, with_degrees: bool = True
) -> WeightedRows:
    """As the engine has them: a part of rows K|V that lie between others, which are NaN here."""
    num_heads, num_rows, width = keys.shape
    generator = torch.Generator().manual_seed(num_rows + width)
    both = torch.full((num_heads, num_rows + 3, 2 * width), float("nan"))
    both[:, 2:-1] = torch.cat([keys, torch.randn(keys.shape, generator=generator)], dim=-1)
    both = both.to(device, dtype)[:, 2:-1]
    positions = (torch.arange(num_rows + 3) * 7).expand(num_heads, -1)[:, 2:-1]
    degrees = torch.full((num_heads, num_rows + 3), float("nan"))[:, 2:-1].fill_(1)
    if with_degrees:
        degrees.copy_(torch.randint(1, 30, degrees.shape, generator=generator))
        positions = positions.contiguous()
    return WeightedRows(positions.to(device), degrees.to(device), both[..., :width], both[..., width:])


def check(
    rows: WeightedRows, chunk: int, num_merged: int, dtype: torch.dtype = torch.float32
) -> WeightedRows:
    found = merge_rows(rows, chunk, num_merged, dtype)
    expected = reference.merge_rows(rows, chunk, num_merged, dtype)
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.degrees, expected.degrees)
    assert found.keys.dtype == found.values.dtype == dtype
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(found.keys, expected.keys, **tolerance)
    torch.testing.assert_close(found.values, expected.values, **tolerance)
    return found


@pytest.mark.parametrize(
    ("num_rows", "chunk", "width", "dtype"),
    [
        (300, 256, 128, torch.bfloat16),
        (300, 256, 64, torch.float32),
        (200, 100, 96, torch.float32),
        (77, 32, 96, torch.bfloat16),
        (77, 32, 128, torch.float16),
        (23, 5, 80, torch.float32),
        (9, 2, 16, torch.float16),
    ],
)
def test_matches_are_those_of_the_reference(
    device: torch.device, num_rows: int, chunk: int, width: int, dtype: torch.dtype
) -> None:
    rows = rows_of(device, signs(2, num_rows, width), dtype)
    found, expected = match_rows(rows.keys, chunk), reference.match_rows(rows.keys, chunk)
    assert torch.equal(found.source, expected.source)
    assert torch.equal(found.partner, expected.partner)
    assert torch.equal(found.similarity, expected.similarity)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_of_any_rows_are_the_best_but_for_rounding(device: torch.device, dtype: torch.dtype) -> None:
    rows = rows_of(device, walk(3, 700, 128), dtype)
    found, expected = match_rows(rows.keys, 256), reference.match_rows(rows.keys.double(), 256)
    # One step apart where the exact cosine lies at half a step.
    torch.testing.assert_close(found.similarity, expected.similarity, atol=1.01 / 4096, rtol=0)
    assert (found.similarity == expected.similarity).float().mean() > 0.99
    assert (found.partner == expected.partner).float().mean() > 0.99


@pytest.mark.parametrize(("num_rows", "chunk"), [(1, 8), (2, 8), (17, 8), (257, 256), (320, 255), (13, 2)])
def test_so_many_rows_merge(device: torch.device, num_rows: int, chunk: int) -> None:
    """None, one, all that have a partner; a last chunk of one row; chunks of odd length."""
    most = num_matches(num_rows, chunk)
    rows = rows_of(device, signs(2, num_rows, 16), torch.float32)
    for num_merged in sorted({0, min(1, most), most}):
        merged = check(rows, chunk, num_merged)
        assert merged.positions.shape == (2, num_rows - num_merged)
        assert torch.equal(merged.degrees.sum(1), rows.degrees.sum(1))


@pytest.mark.parametrize(
    ("width", "dtype", "with_degrees"),
    [
        (16, torch.float32, True),
        (80, torch.float32, False),
        (96, torch.float16, True),
        (128, torch.bfloat16, True),
    ],
)
def test_head_sizes_and_types(
    device: torch.device, width: int, dtype: torch.dtype, with_degrees: bool
) -> None:
    # Cosines of signs lie between the steps, where rounding decides nothing.
    rows = rows_of(device, signs(2, 150, width), dtype, with_degrees)
    check(rows, 64, 40)
    check(rows, 64, 40, dtype)


def test_whole_chunks_of_16_bit_rows(device: torch.device) -> None:
    """Of the size that is served, whose programs have the most warps and the fewest registers for them."""
    keys = signs(2, 700, 128)
    merged = check(rows_of(device, keys, torch.bfloat16), 256, 200, torch.bfloat16)
    again = merge_rows(rows_of(device, keys, torch.bfloat16), 256, 200, torch.bfloat16)
    assert torch.equal(merged.positions, again.positions)
    assert torch.equal(merged.keys, again.keys)


@pytest.mark.parametrize("num_merged", [1, 5, 25, 52])
def test_ties_across_chunks_go_to_the_higher_rows(device: torch.device, num_merged: int) -> None:
    keys = torch.ones(2, 103, 16)
    keys[1, :50] = walk(1, 50, 16)
    merged = check(rows_of(device, keys, torch.float32), 8, num_merged)
    removed = set((torch.arange(2, 105) * 7).tolist()) - set(merged.positions[0].tolist())
    # The last chunk has 7 rows, and of these 4 seek a partner.
    seeking = [row for row in range(103) if row % 8 % 2 == 0]
    assert removed == {7 * (row + 2) for row in seeking[-num_merged:]}


def test_chunks_are_chosen_from_tile_by_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHOSEN_TILE", 64)
    # 39 chunks, 16 at a time.
    rows = rows_of(device, signs(1, 305, 16), torch.float32)
    for num_merged in 1, 70:
        check(rows, 8, num_merged)


def test_many_rows_into_one_weigh_by_their_degrees(device: torch.device) -> None:
    keys = walk(1, 256, 64)
    keys[0, 0::2] = keys[0, 101]
    rows = rows_of(device, keys, torch.float32)
    merged = check(rows, 256, 128)
    members = [*range(0, 256, 2), 101]
    weights = rows.degrees[0, members, None]
    assert float(merged.degrees[0, 50]) == float(weights.sum())
    mean = (rows.values[0, members] * weights).sum(0) / weights.sum()
    torch.testing.assert_close(merged.values[0, 50], mean, atol=1e-5, rtol=1e-5)


def test_rounds_follow_each_other(device: torch.device) -> None:
    mine = theirs = rows_of(device, signs(2, 400, 64), torch.bfloat16, with_degrees=False)
    for num_merged in 120, 60, 45:
        mine = merge_rows(mine, 128, num_merged)
        theirs = reference.merge_rows(theirs, 128, num_merged)
    assert torch.equal(mine.degrees.sum(1), theirs.degrees.sum(1))
    assert (mine.positions == theirs.positions).float().mean() > 0.95
    assert bool((mine.positions.diff(dim=1) > 0).all())


def test_rows_of_zeros_and_of_what_is_no_number_do_no_harm(device: torch.device) -> None:
    keys = walk(1, 64, 16)
    keys[0, :20] = 0
    check(rows_of(device, keys, torch.float32), 32, 20)
    keys[0, 5] = float("nan")
    keys[0, 40] = float("inf")
    merged = merge_rows(rows_of(device, keys, torch.float32), 32, 20)
    assert bool((merged.positions.diff(dim=1) > 0).all())
    assert float(merged.degrees.sum()) == float(rows_of(device, keys, torch.float32).degrees.sum())


def test_chunks_beyond_a_tile_go_to_the_reference(device: torch.device) -> None:
    rows = rows_of(device, signs(1, 300, 16), torch.float32)
    expected = reference.match_rows(rows.keys, 300)
    assert torch.equal(match_rows(rows.keys, 300).partner, expected.partner)
    check(rows, 300, 100)


def test_more_than_have_a_partner_are_refused(device: torch.device) -> None:
    rows = rows_of(device, signs(1, 17, 16), torch.float32)
    for merge in merge_rows, reference.merge_rows:
        with pytest.raises(ValueError, match="8 have a partner"):
            merge(rows, 8, 9)


def test_no_heads_are_no_error(device: torch.device) -> None:
    rows = rows_of(device, signs(2, 20, 16), torch.float32)
    none = WeightedRows(rows.positions[:0], rows.degrees[:0], rows.keys[:0], rows.values[:0])
    assert merge_rows(none, 8, 3).keys.shape == (0, 17, 16)
    assert match_rows(none.keys, 8).partner.shape == (0, 10)
