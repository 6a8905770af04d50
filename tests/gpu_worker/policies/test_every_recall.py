"""Situations that every method with an index of its own meets, each on tiny indexes."""

from __future__ import annotations

import pytest
import torch
from policy_index import SHAPE, Tokens, check_seats_apart, grow, new_index, select

from gpu_worker.policies.bitkeys.policy import BitKeys
from gpu_worker.policies.infinigen.policy import InfiniGen
from gpu_worker.policies.infllm.policy import InfLLM
from gpu_worker.policies.quest.policy import Quest
from gpu_worker.policies.recall import RecallPolicy
from gpu_worker.policies.sparq.policy import SparQ

POLICIES = [
    BitKeys(),
    InfiniGen(ratio=0.5),
    InfLLM(block_size=16, repr_topk=2, num_sink=4),
    Quest(),
    SparQ(num_sink=4),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_seats_are_apart(policy: RecallPolicy) -> None:
    check_seats_apart(policy, num_tokens=120, budget=50, k=32)


@pytest.mark.parametrize("query", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_of_keys_that_score_alike_the_later_are_taken(policy: RecallPolicy, query: float) -> None:
    """Whole pages and blocks are: none is split."""
    index, tokens = new_index(policy), Tokens.random(96, 0)
    tokens.keys[:] = 1.0
    span = grow(policy, index, 0, tokens, policy.plan(96, 48))
    count = 16 + span[1] % 16
    last = list(range(span[1] - count, span[1]))
    queries = torch.full((1, 2 * SHAPE.num_kv_heads, SHAPE.head_dim), query)
    assert select(policy, index, queries, {0: span}, layer=0, k=count) == [[last, last]]
