"""SparQ: scores from the query's largest channels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from policy_index import SHAPE, Tokens, candidates_of, grow, new_index, select

from gpu_worker.policies.sparq.policy import SparQ

POLICY = SparQ(num_sink=4)
HEADS, DIM = SHAPE.num_kv_heads, SHAPE.head_dim


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("num_channels", [1, 3, 8])
def test_scores_are_the_weights_by_the_largest_channels(num_channels: int, group: int) -> None:
    policy, shape = SparQ(num_channels=num_channels, num_sink=4), replace(SHAPE, group_size=group)
    index, tokens = new_index(policy, shape), Tokens.random(120, group, shape)
    begin, end = grow(policy, index, 1, tokens, policy.plan(90, 24))
    query = torch.randn(1, HEADS * group, DIM)
    scores = policy.score(index, candidates_of(query, {1: (begin, end)}, layer=1, extra=9))
    assert scores.shape == (1, HEADS, end + 9)
    for head in range(HEADS):
        heads = query[0, head * group : (head + 1) * group].double()
        sizes = heads.abs().sum(dim=0).tolist()
        used = sorted(range(DIM), key=lambda channel: -sizes[channel])[:num_channels]
        keys = tokens.keys[1, head, begin:end].double()
        weights = torch.zeros(end - begin, dtype=torch.float64)
        for one in heads:
            share = float(one[used].abs().sum() / one.abs().sum())
            weights += (keys[:, used] @ one[used] * SHAPE.scale / math.sqrt(share)).softmax(0)
        torch.testing.assert_close(scores[0, head, begin:end].double(), weights, atol=1e-6, rtol=1e-4)
        assert (scores[0, head, :begin] == float("-inf")).all()
        assert (scores[0, head, end:] == float("-inf")).all()


def test_the_channel_that_carries_the_signal_is_read() -> None:
    index, tokens = new_index(POLICY), Tokens.random(100, 0)
    query = torch.full((1, 2 * HEADS, DIM), 0.1)
    # Head 0 looks along channel 5; head 1 against channel 2, for the group as a whole.
    query[0, :2, 5] = 4.0
    query[0, 2:, 2] = torch.tensor([-3.0, -2.0])
    query[0, 3, 6] = 2.5
    tokens.keys[:, 0, [30, 71], 5] = 20.0
    tokens.keys[:, 1, [44, 62], 2] = -20.0
    # Louder, but not where the query is large.
    tokens.keys[:, :, 50, 7] = 90.0
    span = grow(POLICY, index, 0, tokens, POLICY.plan(100, 24))
    assert select(POLICY, index, query, {0: span}, layer=1, k=2) == [[[30, 71], [44, 62]]]


def test_keys_that_leave_the_window_are_as_those_of_a_longer_prompt() -> None:
    grown, whole, tokens = new_index(POLICY), new_index(POLICY), Tokens.random(130, 0)
    begin, end = grow(POLICY, grown, 1, tokens, POLICY.plan(90, 24))
    assert grow(POLICY, whole, 1, tokens, POLICY.plan(130, 24)) == (begin, end)
    assert torch.equal(grown.keys[1, ..., :end], whole.keys[1, ..., :end])
    assert torch.equal(grown.keys[1, ..., begin:end], tokens.keys[:, :, begin:end].mT)
    assert grown.keys[1, ..., end:].isnan().all()
