"""Product-quantised scoring and assignment against loops over heads and positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_worker.policies.pqcache.pq_score import pq_assign, pq_score


def problem(
    batch: int, num_kv_heads: int, group: int, num_positions: int, num_subvectors: int, ksub: int, dsub: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(group)
    query = torch.randn(batch, num_kv_heads * group, num_subvectors * dsub, generator=generator)
    codebooks = torch.randn(batch, num_kv_heads, num_subvectors, ksub, dsub, generator=generator)
    shape = (batch, num_kv_heads, num_positions, num_subvectors)
    codes = torch.randint(0, ksub, shape, generator=generator).to(torch.uint8)
    return query, codebooks, codes


def decode(codebooks: Tensor, codes: Tensor) -> Tensor:
    """Keys as their codes say: [N, d] of one head."""
    return torch.stack(
        [torch.cat([book[code] for book, code in zip(codebooks, row, strict=True)]) for row in codes.tolist()]
    )


def score_loop(
    query: Tensor, codebooks: Tensor, codes: Tensor, spans: list[tuple[int, int]], scale: float
) -> Tensor:
    batch, num_kv_heads, num_positions, _ = codes.shape
    group = query.shape[1] // num_kv_heads
    scores = torch.full((batch, num_kv_heads, num_positions), float("-inf"), dtype=torch.float64)
    for b, (begin, end) in enumerate(spans):
        for kv_head in range(num_kv_heads):
            keys = decode(codebooks[b, kv_head], codes[b, kv_head, begin:end]).double()
            scores[b, kv_head, begin:end] = 0
            for head in range(kv_head * group, (kv_head + 1) * group):
                scores[b, kv_head, begin:end] += (keys @ query[b, head].double() * scale).softmax(0)
    return scores


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize(("num_subvectors", "ksub", "dsub"), [(2, 64, 32), (1, 4, 64), (4, 16, 24)])
def test_scores_are_the_softmax_over_decoded_candidates(
    group: int, num_subvectors: int, ksub: int, dsub: int
) -> None:
    query, codebooks, codes = problem(3, 2, group, 50, num_subvectors, ksub, dsub)
    spans = [(4, 50), (0, 1), (20, 37)]
    begin, end = torch.tensor(spans).T
    # Outside the candidates lies what an earlier request left: any byte.
    for b, (first, last) in enumerate(spans):
        codes[b, :, :first] = 255
        codes[b, :, last:] = 255
    seats = torch.tensor([2, 0, 1])
    scores = pq_score(query, codebooks[[1, 2, 0]], codes[[1, 2, 0]], seats, begin, end, 0.3, 50)
    assert scores.dtype == torch.float32
    expected = score_loop(query, codebooks, codes, spans, 0.3)
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=1e-4)


def test_unused_centroids_may_be_anything() -> None:
    query, codebooks, codes = problem(1, 2, 3, 20, 2, 8, 4)
    codes %= 5
    spans = (torch.tensor([0]), torch.tensor([2]), torch.tensor([19]))
    clean = pq_score(query, codebooks, codes, *spans, 1.0, 19)
    assert clean.shape == (1, 2, 19)
    codebooks[:, :, :, 5:] = float("nan")
    assert torch.equal(pq_score(query, codebooks, codes, *spans, 1.0, 19), clean)


def test_assignment_takes_the_nearest_centroid_of_every_part() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 2, 30, 12, generator=generator)
    codebooks = torch.randn(3, 2, 3, 16, 4, generator=generator)
    codes = pq_assign(keys, codebooks)
    assert codes.dtype == torch.uint8
    assert codes.shape == (3, 2, 30, 3)
    for layer in range(3):
        for head in range(2):
            for token in range(30):
                for part in range(3):
                    difference = (
                        codebooks[layer, head, part] - keys[layer, head, token, 4 * part : 4 * part + 4]
                    )
                    nearest = int(difference.double().square().sum(-1).argmin())
                    assert int(codes[layer, head, token, part]) == nearest


def test_assignment_of_a_tie_is_the_smallest_code() -> None:
    codebooks = torch.tensor([[[9.0], [2.0], [2.0], [2.0]]])
    assert pq_assign(torch.tensor([[2.5]]), codebooks).tolist() == [[1]]


def test_a_centroid_is_its_own_code_also_in_bf16() -> None:
    codebooks = torch.randn(2, 256, 32, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    keys = torch.cat([codebooks[0], codebooks[1]], dim=-1).bfloat16()
    assert pq_assign(keys, codebooks).tolist() == [[code, code] for code in range(256)]
