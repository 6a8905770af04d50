"""Selection by pairs of codes against sorting candidates one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_worker.policies.pqcache.pq_select import pq_select


def weight_of_each(query: Tensor, books: Tensor, codes: list[list[int]], scale: float) -> list[float]:
    """Weights of candidates. query: [G, d], books: [2, ksub, d/2] of one KV head."""
    keys = torch.stack([torch.cat([books[0, c], books[1, e]]) for c, e in codes]).double()
    weights = (keys @ query.double().T * scale).softmax(dim=0).sum(dim=1).tolist()
    # Equal codes, equal weight: also where a product of matrices rounds its rows differently.
    first = {tuple(pair): weight for pair, weight in zip(reversed(codes), reversed(weights), strict=True)}
    return [first[tuple(pair)] for pair in codes]


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("ksub", [2, 6, 64])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_best_candidates_are_taken_and_of_equals_the_last(group: int, ksub: int, share: float) -> None:
    generator = torch.Generator().manual_seed(group)
    query = torch.randn(3, 2 * group, 10, generator=generator)
    books = torch.randn(4, 2, 2, ksub, 5, generator=generator)
    codes = torch.randint(0, ksub, (4, 2, 90, 2), generator=generator).to(torch.uint8)
    spans, seats = [(4, 90), (0, 1), (20, 57)], [2, 0, 3]
    counts = torch.zeros(4, 2, ksub * ksub, dtype=torch.int32)
    asked = []
    for (begin, end), seat in zip(spans, seats, strict=True):
        codes[seat, :, :begin] = 255
        codes[seat, :, end:] = 255
        for head in range(2):
            for c, e in codes[seat, head, begin:end].tolist():
                counts[seat, head, c * ksub + e] += 1
        asked.append(int(share * (end - begin)))
    begins, ends = torch.tensor(spans).T
    width = max(asked) + 2
    taken = pq_select(
        query, books, codes, counts, torch.tensor(seats), begins, ends, torch.tensor(asked), width, 90, 0.4
    )
    for b, ((begin, end), seat) in enumerate(zip(spans, seats, strict=True)):
        for head in range(2):
            of_group = query[b, head * group : (head + 1) * group]
            weights = weight_of_each(of_group, books[seat, head], codes[seat, head, begin:end].tolist(), 0.4)
            order = sorted(range(begin, end), key=lambda p: (-weights[p - begin], -p))
            expected = sorted(order[: asked[b]])
            assert taken[b, head].tolist() == expected + [-1] * (width - len(expected))


def test_more_than_there_is_leaves_padding() -> None:
    codes = torch.tensor([[[[0, 1], [1, 1], [1, 0]]]], dtype=torch.uint8)
    counts = torch.tensor([[[0, 1, 1, 1]]], dtype=torch.int32)
    begin, end = torch.tensor([0]), torch.tensor([3])
    taken = pq_select(
        torch.ones(1, 1, 4),
        torch.rand(1, 1, 2, 2, 2),
        codes,
        counts,
        begin,
        begin,
        end,
        torch.tensor([5]),
        6,
        3,
        1.0,
    )
    assert taken.tolist() == [[[0, 1, 2, -1, -1, -1]]]


@pytest.mark.parametrize(
    ("shape", "message"), [((1, 1, 4, 64, 1), "4 parts"), ((1, 1, 2, 256, 2), "256 centroids")]
)
def test_what_has_no_table_of_pairs_is_refused(shape: tuple[int, ...], message: str) -> None:
    zeros = torch.zeros(1, dtype=torch.int64)
    codes, counts = torch.zeros(1, 1, 3, 2, dtype=torch.uint8), torch.zeros(1, 1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        pq_select(
            torch.ones(1, 1, 4), torch.rand(shape), codes, counts, zeros, zeros, zeros, zeros, 1, 3, 1.0
        )
