"""Coding of what leaves the window, by kernel and reference, against the assignment of one key at a time."""

from __future__ import annotations

import pytest
import torch
from seat_rig import seats_of
from torch import Tensor

from gpu_worker.policies.pqcache.pq_append import reference

kernel = pytest.importorskip("gpu_worker.policies.pqcache.pq_append.kernel")


def problem(
    device: torch.device,
    parts: tuple[int, int, int],
    positions: list[int],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """Keys, codebooks, codes, seats, positions of 2 layers of 3 KV heads, the last 2 of 3; parts: m, ksub, d/m.

    Small integers: distances are exact, and equal ones frequent.
    """
    num_parts, ksub, dsub = parts
    batch, generator = len(positions), torch.Generator().manual_seed(ksub)
    # Every token's key lies beside its value.
    rows = torch.randint(-2, 3, (batch, 2, 3, 2 * num_parts * dsub), generator=generator).to(dtype)
    seats = seats_of(batch, device)
    books = torch.full((batch + 2, 3, 3, *parts), float("nan"))
    books[seats.cpu(), 1:] = torch.randint(-1, 2, (batch, 2, 3, *parts), generator=generator).float()
    codes = torch.full((batch + 2, 3, 3, 40, num_parts), 255, dtype=torch.uint8)
    keys = rows.to(device)[..., : num_parts * dsub]
    return (
        keys,
        books.to(device)[:, 1:],
        codes.to(device)[:, 1:],
        seats,
        torch.tensor(positions, device=device),
    )


def check(inputs: tuple[Tensor, ...], is_counted: bool) -> None:
    keys, books, codes, seats, positions = inputs
    ksub, dsub = books.shape[4:]
    pairs = torch.arange(ksub**2, dtype=torch.int32, device=keys.device)
    counts = pairs.expand(*books.shape[:3], -1).contiguous() if is_counted else None
    expected_codes, expected_counts = codes.clone(), None if counts is None else counts.clone()
    for row, (seat, position) in enumerate(zip(seats.tolist(), positions.tolist(), strict=True)):
        for layer, head in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
            if position < 0:
                continue
            parts = keys[row, layer, head].double().split(dsub)
            distances = [
                (book - part).square().sum(1).tolist()
                for book, part in zip(books[seat, layer, head].double(), parts, strict=True)
            ]
            # The smallest code of equals.
            found = [each.index(min(each)) for each in distances]
            expected_codes[seat, layer, head, position] = torch.tensor(found, device=codes.device)
            if expected_counts is not None:
                expected_counts[seat, layer, head, found[0] * ksub + found[1]] += 1
    for module in kernel, reference:
        new_codes, new_counts = codes.clone(), None if counts is None else counts.clone()
        module.pq_append(keys, books, new_codes, new_counts, seats, positions)
        assert torch.equal(new_codes, expected_codes)
        if new_counts is not None:
            assert torch.equal(new_counts, expected_counts)


@pytest.mark.parametrize("parts", [(2, 64, 32), (2, 2, 5), (2, 100, 64), (2, 128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_ties_and_counts_are_those_of_the_nearest_centroids(
    device: torch.device, parts: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check(problem(device, parts, [7, -1, 0, 39], dtype), is_counted=True)


@pytest.mark.parametrize("parts", [(1, 256, 96), (3, 200, 16), (16, 256, 4)])
def test_parts_that_are_no_pair(device: torch.device, parts: tuple[int, int, int]) -> None:
    check(problem(device, parts, [3, 30], torch.float16), is_counted=False)


def test_codebooks_in_several_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.policies.pqcache.pq_append.kernel.TILE_ELEMENTS", 64)
    check(problem(device, (2, 50, 12), [8, 1]), is_counted=True)


def test_rows_without_a_token_change_nothing(device: torch.device) -> None:
    keys, books, codes, seats, positions = inputs = problem(device, (2, 16, 8), [-1, -1])
    check(inputs, is_counted=True)
    kernel.pq_append(keys[:0], books, codes, None, seats[:0], positions[:0])


def test_a_centroid_is_its_own_code(device: torch.device) -> None:
    books = torch.randn(64, 1, 1, 2, 64, 24, generator=torch.Generator().manual_seed(3)).to(device)
    every = torch.arange(64, device=device)
    keys = torch.stack([torch.cat([books[s, 0, 0, 0, s], books[s, 0, 0, 1, 63 - s]]) for s in range(64)])
    for module in kernel, reference:
        codes = torch.zeros(64, 1, 1, 2, 2, dtype=torch.uint8, device=device)
        module.pq_append(keys.view(64, 1, 1, 48), books, codes, None, every, torch.ones_like(every))
        assert codes[:, 0, 0, 1].tolist() == [[code, 63 - code] for code in range(64)]


def test_only_pairs_are_counted(device: torch.device) -> None:
    keys, books, codes, seats, positions = problem(device, (3, 16, 8), [1])
    for module in kernel, reference:
        with pytest.raises(ValueError, match="3 parts"):
            module.pq_append(keys, books, codes, torch.zeros(3, 2, 3, 256, device=device), seats, positions)
