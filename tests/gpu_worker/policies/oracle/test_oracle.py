"""The oracle: exact attention weights over every past token, the selection among the middle."""

from __future__ import annotations

import pytest
import torch
from policy_index import queries_of

from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.recall import Candidates

POLICY = Oracle(num_sink=4)


def test_scores_are_the_exact_weights_of_the_candidates() -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, spans, scale = torch.tensor([60, 33]), [(4, 50), (2, 33)], 0.4
    query = torch.randn(2, 6, 8, generator=generator)
    keys = torch.randn(2, 2, 60, 8, generator=generator)
    keys[1, :, 33:] = float("nan")
    begin, end = torch.tensor(spans).T
    candidates = Candidates(
        0, queries_of(query), torch.arange(2), begin, end, 50, scale, lambda: (keys, num_tokens)
    )
    scores = POLICY.score(None, candidates)
    assert scores.shape == (2, 2, 50)
    for b, (first, last) in enumerate(spans):
        for kv_head in range(2):
            past = keys[b, kv_head, : num_tokens[b]].double()
            heads = query[b, 3 * kv_head : 3 * kv_head + 3].double()
            weights = sum((past @ head * scale).softmax(0) for head in heads)[first:last]
            exact = scores[b, kv_head, first:last].double()
            torch.testing.assert_close(exact, weights, atol=1e-6, rtol=1e-5)
            rest = torch.cat([scores[b, kv_head, :first], scores[b, kv_head, last:]])
            assert (rest == float("-inf")).all()


def test_the_oracle_refuses_to_score_without_keys() -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(LookupError, match="exact keys"):
        POLICY.score(None, Candidates(0, queries_of(torch.zeros(1, 6, 8)), one, one, one, 1, 1.0))
