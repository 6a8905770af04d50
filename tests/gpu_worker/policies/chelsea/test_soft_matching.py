"""Soft matching: kernels against their references, and a round of those against loops over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_rig import amid_nan
from torch import Tensor

from gpu_worker.policies.chelsea.soft_matching import WeightedRows, num_matches, reference

kernel = pytest.importorskip("gpu_worker.policies.chelsea.soft_matching.kernel")


def signs(num_heads: int, num_rows: int, width: int) -> Tensor:
    """Rows of ones and minus ones: cosines lie far from halves of a step, however they are summed, and many tie."""
    generator = torch.Generator().manual_seed(num_rows)
    kinds = torch.randint(0, 2, (max(2, num_rows // 3), width), generator=generator) * 2.0 - 1
    return kinds[torch.randint(0, len(kinds), (num_heads, num_rows), generator=generator)]


def walk(num_heads: int, num_rows: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_heads, num_rows, width, generator=generator).cumsum(1)


def rows_of(
    device: torch.device, keys: Tensor, dtype: torch.dtype = torch.float32, with_degrees: bool = True
) -> WeightedRows:
    """As the engine has them: a part of rows K|V that lie between others, which are NaN here."""
    num_heads, num_rows, width = keys.shape
    generator = torch.Generator().manual_seed(num_rows + width)
    both = torch.cat([keys, torch.randn(keys.shape, generator=generator)], dim=-1)
    both = amid_nan(both.to(device, dtype), beside=0)
    positions = (torch.arange(num_rows + 3) * 7).expand(num_heads, -1)[:, 2:-1]
    degrees = amid_nan(torch.ones(num_heads, num_rows).to(device))
    if with_degrees:
        degrees.copy_(torch.randint(1, 30, degrees.shape, generator=generator))
        positions = positions.contiguous()
    return WeightedRows(positions.to(device), degrees, both[..., :width], both[..., width:])


def check(
    rows: WeightedRows, chunk: int, num_merged: int, dtype: torch.dtype = torch.float32
) -> WeightedRows:
    found = kernel.merge_rows(rows, chunk, num_merged, dtype)
    expected = reference.merge_rows(rows, chunk, num_merged, dtype)
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.degrees, expected.degrees)
    assert found.keys.dtype == found.values.dtype == dtype
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(found.keys, expected.keys, **tolerance)
    torch.testing.assert_close(found.values, expected.values, **tolerance)
    return found


def merged_by_hand(
    rows: WeightedRows, chunk: int, num_merged: int
) -> list[dict[int, tuple[float, list[int]]]]:
    """Return for each head, by row that stays, its degree and the rows whose mean it is."""
    heads = []
    for keys, degrees in zip(rows.keys.double(), rows.degrees.tolist(), strict=True):
        unit = torch.nn.functional.normalize(keys, dim=-1)
        edges = []
        for source in range(len(keys)):
            begin = source // chunk * chunk
            offered = range(begin + 1, min(begin + chunk, len(keys)), 2)
            if (source - begin) % 2 or not offered:
                continue
            steps = {row: round(4096 * float(unit[source] @ unit[row])) for row in offered}
            target = max(offered, key=lambda row, steps=steps: (steps[row], -row))
            edges.append((steps[target], source, target))
        taken = {source: target for _, source, target in sorted(edges)[len(edges) - num_merged :]}
        stays = {row: (0.0, []) for row in range(len(keys)) if row not in taken}
        for row, degree in enumerate(degrees):
            place = taken.get(row, row)
            stays[place] = stays[place][0] + degree, [*stays[place][1], row]
        heads.append(stays)
    return heads


@pytest.mark.parametrize(("num_rows", "chunk"), [(33, 8), (29, 5), (30, 100)])
@pytest.mark.parametrize("keys_of", [signs, walk])
def test_a_round_is_what_loops_make_it(
    num_rows: int, chunk: int, keys_of: Callable[[int, int, int], Tensor]
) -> None:
    rows = rows_of(torch.device("cpu"), keys_of(2, num_rows, 16))
    most = num_matches(num_rows, chunk)
    for num_merged in 0, 1, most // 2, most:
        merged = reference.merge_rows(rows, chunk, num_merged)
        for head, expected in enumerate(merged_by_hand(rows, chunk, num_merged)):
            assert merged.positions[head].tolist() == rows.positions[head, list(expected)].tolist()
            assert merged.degrees[head].tolist() == [degree for degree, _ in expected.values()]
            for place, (degree, members) in enumerate(expected.values()):
                weights = rows.degrees[head, members, None] / degree
                for of, given in (merged.keys, rows.keys), (merged.values, rows.values):
                    torch.testing.assert_close(of[head, place], (given[head, members] * weights).sum(0))


def test_the_last_round_may_round(device: torch.device) -> None:
    rows = rows_of(device, walk(1, 20, 16))
    for module in kernel, reference:
        wide, narrow = (module.merge_rows(rows, 8, 6, dtype) for dtype in (torch.float32, torch.bfloat16))
        torch.testing.assert_close(narrow.keys, wide.keys.bfloat16(), atol=0, rtol=2**-7)
        torch.testing.assert_close(narrow.values, wide.values.bfloat16(), atol=0, rtol=2**-7)
        assert torch.equal(narrow.degrees, wide.degrees)


@pytest.mark.parametrize(
    ("num_rows", "chunk", "width", "dtype"),
    [
        (300, 256, 128, torch.bfloat16),
        (200, 100, 96, torch.float32),
        (77, 32, 128, torch.float16),
        (23, 5, 80, torch.float32),
        (9, 2, 16, torch.float16),
    ],
)
def test_matches_are_those_of_the_reference(
    device: torch.device, num_rows: int, chunk: int, width: int, dtype: torch.dtype
) -> None:
    rows = rows_of(device, signs(2, num_rows, width), dtype)
    found, expected = kernel.match_rows(rows.keys, chunk), reference.match_rows(rows.keys, chunk)
    assert torch.equal(found.source, expected.source)
    assert torch.equal(found.partner, expected.partner)
    assert torch.equal(found.similarity, expected.similarity)


def test_matches_of_any_rows_are_the_best_but_for_rounding(device: torch.device) -> None:
    rows = rows_of(device, walk(2, 300, 128), torch.bfloat16)
    found, expected = kernel.match_rows(rows.keys, 256), reference.match_rows(rows.keys.double(), 256)
    # One step apart where the exact cosine lies at half a step.
    torch.testing.assert_close(found.similarity, expected.similarity, atol=1.01 / 4096, rtol=0)
    assert (found.similarity == expected.similarity).float().mean() > 0.99
    assert (found.partner == expected.partner).float().mean() > 0.99


@pytest.mark.parametrize(("num_rows", "chunk"), [(1, 8), (17, 8), (257, 256), (320, 255), (13, 2)])
def test_so_many_rows_merge(device: torch.device, num_rows: int, chunk: int) -> None:
    """None, one, all that have a partner; a last chunk of one row; chunks of odd length."""
    most = num_matches(num_rows, chunk)
    rows = rows_of(device, signs(2, num_rows, 16))
    for num_merged in sorted({0, min(1, most), most}):
        merged = check(rows, chunk, num_merged)
        assert merged.positions.shape == (2, num_rows - num_merged)
        assert torch.equal(merged.degrees.sum(1), rows.degrees.sum(1))


@pytest.mark.parametrize(
    ("width", "dtype", "with_degrees"),
    [
        (64, torch.bfloat16, False),
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
    """Match chunks of the served size, where programs have the most warps and the fewest registers for them."""
    rows = rows_of(device, signs(2, 700, 128), torch.bfloat16)
    merged = check(rows, 256, 200, torch.bfloat16)
    again = kernel.merge_rows(rows, 256, 200, torch.bfloat16)
    assert torch.equal(merged.positions, again.positions)
    assert torch.equal(merged.keys, again.keys)


@pytest.mark.parametrize("num_merged", [1, 25, 52])
def test_ties_across_chunks_go_to_the_higher_rows(device: torch.device, num_merged: int) -> None:
    keys = torch.ones(2, 103, 16)
    keys[1, :50] = walk(1, 50, 16)
    merged = check(rows_of(device, keys), 8, num_merged)
    removed = set((torch.arange(2, 105) * 7).tolist()) - set(merged.positions[0].tolist())
    # The last chunk has 7 rows, and of these 4 seek a partner.
    seeking = [row for row in range(103) if row % 8 % 2 == 0]
    assert removed == {7 * (row + 2) for row in seeking[-num_merged:]}


def test_chunks_are_chosen_from_tile_by_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHOSEN_TILE", 64)
    # 39 chunks, 16 at a time.
    rows = rows_of(device, signs(1, 305, 16))
    for num_merged in 1, 70:
        check(rows, 8, num_merged)


def test_many_rows_merge_into_one(device: torch.device) -> None:
    keys = walk(1, 256, 64)
    keys[0, 0::2] = keys[0, 101]
    rows = rows_of(device, keys)
    merged = check(rows, 256, 128)
    assert float(merged.degrees[0, 50]) == float(rows.degrees[0, [*range(0, 256, 2), 101]].sum())


def test_rows_of_zeros_and_of_what_is_no_number_do_no_harm(device: torch.device) -> None:
    keys = walk(1, 64, 16)
    keys[0, :20] = 0
    check(rows_of(device, keys), 32, 20)
    keys[0, 5] = float("nan")
    keys[0, 40] = float("inf")
    rows = rows_of(device, keys)
    merged = kernel.merge_rows(rows, 32, 20)
    assert bool((merged.positions.diff(dim=1) > 0).all())
    assert float(merged.degrees.sum()) == float(rows.degrees.sum())


def test_chunks_beyond_a_tile_go_to_the_reference(device: torch.device) -> None:
    rows = rows_of(device, signs(1, 300, 16))
    expected = reference.match_rows(rows.keys, 300)
    assert torch.equal(kernel.match_rows(rows.keys, 300).partner, expected.partner)
    check(rows, 300, 100)


def test_more_than_have_a_partner_are_refused(device: torch.device) -> None:
    rows = rows_of(device, signs(1, 17, 16))
    for module in kernel, reference:
        with pytest.raises(ValueError, match="8 have a partner"):
            module.merge_rows(rows, 8, 9)


def test_no_heads_are_no_error(device: torch.device) -> None:
    none = rows_of(device, signs(2, 20, 16)[:0])
    assert kernel.merge_rows(none, 8, 3).keys.shape == (0, 17, 16)
    assert kernel.match_rows(none.keys, 8).partner.shape == (0, 10)
