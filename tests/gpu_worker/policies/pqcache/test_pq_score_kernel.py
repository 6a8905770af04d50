"""The PQ scoring kernels against their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from seat_rig import seated, seats_of

from gpu_worker.policies.pqcache.pq_score import reference
from gpu_worker.policies.pqcache.pq_score.kernel import pq_score


def problem(
    device: torch.device,
    group: int,
    num_positions: int,
    parts: tuple[int, int, int] = (2, 64, 32),
    dtype: torch.dtype = torch.float32,
    spans: tuple[tuple[int, int], ...] = ((0, 1),),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs of three KV heads; any byte outside the candidates. parts: m, ksub, d/m."""
    num_parts, ksub, dsub = parts
    batch, generator = len(spans), torch.Generator().manual_seed(num_positions)
    query = torch.randn(batch, 3 * group, num_parts * dsub, generator=generator).to(dtype)
    codebooks = torch.randn(batch, 3, num_parts, ksub, dsub, generator=generator)
    codes = torch.randint(0, ksub, (batch, 3, num_positions, num_parts), generator=generator).to(torch.uint8)
    begin, end = torch.tensor(spans).T
    for b, (first, last) in enumerate(spans):
        codes[b, :, :first] = 255
        codes[b, :, last:] = 255
    return (
        query.to(device),
        codebooks.to(device),
        codes.to(device),
        begin.to(device),
        end.to(device),
    )


def in_seats(inputs: tuple[Tensor, ...], scale: float) -> tuple[Tensor | float | int, ...]:
    """The arguments that score `inputs` where they lie in one layer of an index."""
    query, codebooks, codes, begin, end = inputs
    seats = seats_of(len(begin), query.device)
    books = seated(codebooks, seats, float("nan"))
    return query, books, seated(codes, seats, 255), seats, begin, end, scale, codes.shape[2]


def check(inputs: tuple[Tensor, ...], scale: float = 0.3) -> None:
    arguments = in_seats(inputs, scale)
    scores = pq_score(*arguments)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, reference.pq_score(*arguments), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("num_positions", [1, 65, 700])
def test_weights_are_those_of_the_reference(device: torch.device, group: int, num_positions: int) -> None:
    spans = ((0, num_positions), (num_positions // 3, max(num_positions - 5, num_positions // 3 + 1)))
    check(problem(device, group, num_positions, spans=spans))


@pytest.mark.parametrize("parts", [(1, 2, 64), (1, 256, 96), (4, 16, 24), (16, 8, 4), (3, 200, 5)])
def test_every_division_of_the_key(device: torch.device, parts: tuple[int, int, int]) -> None:
    check(problem(device, 4, 130, parts, spans=((7, 120), (0, 130))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_of_16_bits(device: torch.device, dtype: torch.dtype) -> None:
    check(problem(device, 4, 100, dtype=dtype, spans=((3, 99),)))


def test_rows_of_many_chunks_and_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.policies.pqcache.pq_score.kernel.NUM_CHUNKS", 4)
    monkeypatch.setattr("gpu_worker.policies.pqcache.pq_score.kernel.TILE_ELEMENTS", 128)
    # Tiles of 32: chunks of three tiles, the last of two; candidates that begin or end within a tile, or fill one.
    spans = ((0, 361), (40, 300), (96, 128), (359, 361))
    check(problem(device, 4, 361, spans=spans))


def test_a_sequence_without_candidates_has_no_scores(device: torch.device) -> None:
    arguments = in_seats(problem(device, 3, 70, spans=((20, 20), (5, 60), (40, 12), (0, 0))), 1.0)
    scores = pq_score(*arguments)
    assert torch.isneginf(scores[[0, 2, 3]]).all()
    torch.testing.assert_close(scores[1], reference.pq_score(*arguments)[1], atol=1e-6, rtol=1e-4)


def test_scores_far_apart_neither_overflow_nor_vanish(device: torch.device) -> None:
    inputs = problem(device, 4, 300, spans=((1, 290),))
    check(inputs, scale=40.0)
    # One part so large that every exponential would underflow without the largest score of the candidates.
    inputs[1][:, :, 0, 5] = 1000 * inputs[0][:, ::4, None, :32].squeeze(2)
    inputs[2][..., 0] %= 5
    check(inputs, scale=1.0)
    # All of them so small that a 0 among the largest scores would make every exponential vanish.
    inputs[1][:] = -30 * inputs[0][:, ::4].sign().view(1, 3, 2, 1, 32)
    check((inputs[0][:, ::4].contiguous(), *inputs[1:]))


def test_unused_centroids_may_be_anything(device: torch.device) -> None:
    inputs = problem(device, 3, 90, (2, 64, 24), spans=((4, 80),))
    inputs[2][:, :, 4:80] %= 50
    clean = pq_score(*in_seats(inputs, 1.0))
    inputs[1][:, :, :, 50:] = float("nan")
    assert torch.equal(pq_score(*in_seats(inputs, 1.0)), clean)


def test_no_more_positions_are_scored_than_asked_for(device: torch.device) -> None:
    inputs = problem(device, 4, 90, spans=((4, 71), (0, 60)))
    arguments = in_seats(inputs, 0.5)
    scores = pq_score(*arguments[:-1], 71)
    assert scores.shape == (2, 3, 71)
    assert torch.equal(scores, pq_score(*arguments)[..., :71])
    assert pq_score(*arguments[:-1], 0).shape == (2, 3, 0)
