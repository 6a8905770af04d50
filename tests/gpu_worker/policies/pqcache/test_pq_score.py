"""Product-quantised scores, by kernel and reference, against the softmax over decoded keys in double precision."""

from __future__ import annotations

import pytest
import torch
from seat_rig import seated, seats_of
from torch import Tensor

from gpu_worker.policies.pqcache.pq_score import reference

kernel = pytest.importorskip("gpu_worker.policies.pqcache.pq_score.kernel")


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
    query, codebooks, codes, begin, end = (tensor.cpu() for tensor in inputs)
    expected = torch.full(codes.shape[:3], -torch.inf, dtype=torch.float64)
    for b, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        for head, of_group in enumerate(query[b].double().chunk(3)):
            of_parts = codes[b, head, first:last].long().unbind(1)
            keys = [book[part] for book, part in zip(codebooks[b, head].double(), of_parts, strict=True)]
            weights = (torch.cat(keys, dim=1) @ of_group.T * scale).softmax(dim=0)
            expected[b, head, first:last] = weights.sum(dim=1)
    arguments = in_seats(inputs, scale)
    for module in kernel, reference:
        scores = module.pq_score(*arguments)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.double().cpu(), expected, atol=1e-6, rtol=1e-4)


def test_what_is_attended_beside_the_candidates_takes_its_share(device: torch.device) -> None:
    arguments = in_seats(problem(device, 4, 130, spans=((7, 120), (0, 130))), 0.3)
    beside = torch.linspace(-3, 9, 24, device=device).view(2, 12)
    beside[0, 4:8] = -torch.inf
    own = reference.pq_score(*arguments)
    expected = reference.pq_score(*arguments, beside)
    torch.testing.assert_close(kernel.pq_score(*arguments, beside), expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(expected[0, 1], own[0, 1])
    # As much beside as all candidates together halves every weight.
    query, books, codes, seats, _, _, scale, _ = arguments
    keys = books[seats[1], 2, 0, codes[seats[1], 2, :, 0].long()]
    keys = torch.cat([keys, books[seats[1], 2, 1, codes[seats[1], 2, :, 1].long()]], dim=-1)
    beside[1, 8:] = (query[1, 8:] @ keys.T * scale).logsumexp(-1)
    torch.testing.assert_close(reference.pq_score(*arguments, beside)[1, 2], own[1, 2] / 2)


def check_alike(inputs: tuple[Tensor, ...], scale: float) -> None:
    """Of large products rounding is too much to compare them with exact ones."""
    arguments = in_seats(inputs, scale)
    expected = reference.pq_score(*arguments)
    torch.testing.assert_close(kernel.pq_score(*arguments), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("group", "num_positions"), [(1, 65), (3, 700), (4, 1), (7, 65), (16, 700)])
def test_scores_are_the_softmax_over_decoded_candidates(
    device: torch.device, group: int, num_positions: int
) -> None:
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
    check(problem(device, 3, 70, spans=((20, 20), (5, 60), (40, 12), (0, 0))))


def test_scores_far_apart_neither_overflow_nor_vanish(device: torch.device) -> None:
    inputs = problem(device, 4, 300, spans=((1, 290),))
    check_alike(inputs, scale=40.0)
    # One part so large that every exponential would underflow without the largest score of the candidates.
    inputs[1][:, :, 0, 5] = 1000 * inputs[0][:, ::4, None, :32].squeeze(2)
    inputs[2][..., 0] %= 5
    check_alike(inputs, scale=1.0)
    # All of them so small that a 0 among the largest scores would make every exponential vanish.
    inputs[1][:] = -30 * inputs[0][:, ::4].sign().view(1, 3, 2, 1, 32)
    check_alike((inputs[0][:, ::4].contiguous(), *inputs[1:]), scale=0.3)


def test_unused_centroids_may_be_anything(device: torch.device) -> None:
    inputs = problem(device, 3, 90, (2, 64, 24), spans=((4, 80),))
    inputs[2][:, :, 4:80] %= 50
    clean = [module.pq_score(*in_seats(inputs, 1.0)) for module in (kernel, reference)]
    inputs[1][:, :, :, 50:] = float("nan")
    for module, scores in zip((kernel, reference), clean, strict=True):
        assert torch.equal(module.pq_score(*in_seats(inputs, 1.0)), scores)


def test_no_more_positions_are_scored_than_asked_for(device: torch.device) -> None:
    arguments = in_seats(problem(device, 4, 90, spans=((4, 71), (0, 60))), 0.5)
    for module in kernel, reference:
        scores = module.pq_score(*arguments[:-1], 71)
        assert scores.shape == (2, 3, 71)
        assert torch.equal(scores, module.pq_score(*arguments)[..., :71])
    assert kernel.pq_score(*arguments[:-1], 0).shape == (2, 3, 0)
