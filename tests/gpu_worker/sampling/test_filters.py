"""Each filter against its definition, written as plain loops."""

import math

import pytest
import torch

from gpu_worker.sampling.filters import first_k, keep_min_p, keep_top_k, keep_top_p, ranks


def naive_order(row):
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def naive_top_k(row, k):
    return set(naive_order(row)[:k])


def naive_top_p(row, p):
    weights = [math.exp(x - max(row)) for x in row]
    kept, reached = set(), 0.0
    for i in naive_order(row):
        if kept and reached >= p:
            break
        kept.add(i)
        reached += weights[i] / sum(weights)
    return kept


def naive_min_p(row, min_p):
    weights = [math.exp(x - max(row)) for x in row]
    return {i for i, w in enumerate(weights) if w >= min_p}


def random_logits(vocab_size, ties):
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    return logits.round() if ties else logits


def survivors(filtered):
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in filtered]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab_size", [1, 7, 63, 1000])
def test_keep_top_k(vocab_size, ties):
    logits = random_logits(vocab_size, ties)
    k = torch.tensor([min(n, vocab_size) for n in (1, 2, 3, 13, 60, 1000)])
    kept = survivors(keep_top_k(logits, k, int(k.max())))
    assert kept == [naive_top_k(row, n) for row, n in zip(logits.tolist(), k.tolist(), strict=True)]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab_size", [1, 7, 63, 1000])
def test_keep_top_p(vocab_size, ties):
    logits = random_logits(vocab_size, ties)
    p = torch.tensor([0.0, 0.1, 0.37, 0.5, 0.9, 0.99])
    kept = survivors(keep_top_p(logits, p))
    assert kept == [naive_top_p(row, q) for row, q in zip(logits.tolist(), p.tolist(), strict=True)]


@pytest.mark.parametrize("vocab_size", [1, 7, 63, 1000])
def test_keep_min_p(vocab_size):
    logits = random_logits(vocab_size, ties=False)
    min_p = torch.tensor([0.0, 0.01, 0.1, 0.3, 0.5, 0.99])
    kept = survivors(keep_min_p(logits, min_p))
    assert kept == [naive_min_p(row, q) for row, q in zip(logits.tolist(), min_p.tolist(), strict=True)]


def test_kept_logits_keep_their_values():
    logits = random_logits(63, ties=False)
    for filtered in (
        keep_top_k(logits, torch.full((6,), 5), 5),
        keep_top_p(logits, torch.full((6,), 0.5)),
        keep_min_p(logits, torch.full((6,), 0.1)),
    ):
        assert torch.equal(filtered[filtered.isfinite()], logits[filtered.isfinite()])


def test_first_k_breaks_ties_by_the_smaller_id():
    logits = torch.tensor([[0.0, -0.0, 2.0, -3.0, 2.0, 0.0, -3.0, -torch.inf]])
    assert first_k(logits, 8).tolist() == [[2, 4, 0, 1, 5, 3, 6, 7]]
    assert first_k(logits, 1).tolist() == [[2]]
    assert first_k(logits, 0).shape == (1, 0)


def test_a_rank_is_the_place_in_the_order_whatever_is_equal():
    logits = torch.tensor([[0.0, -1.0, 3.0, 3.0, -0.0, -torch.inf], [1.0] * 6])
    for row, expected in enumerate(([3, 5, 1, 2, 4, 6], [1, 2, 3, 4, 5, 6])):
        found = [int(ranks(logits[row : row + 1], torch.tensor([token]))) for token in range(6)]
        assert found == expected


def test_an_already_filtered_row_stays_filtered():
    logits = keep_top_k(random_logits(63, ties=False), torch.full((6,), 3), 3)
    assert all(len(kept) <= 3 for kept in survivors(keep_top_p(logits, torch.full((6,), 0.999))))
