"""Quest: pages chosen by an upper bound, and taken whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from policy_index import SHAPE, Tokens, candidates_of, grow, new_index, select

from gpu_worker.policies.quest.policy import Quest

POLICY = Quest()
HEADS, DIM = SHAPE.num_kv_heads, SHAPE.head_dim


@pytest.mark.parametrize("group", [1, 3, 4])
def test_a_token_scores_the_bound_of_its_page(group: int) -> None:
    shape = replace(SHAPE, group_size=group)
    index, tokens = new_index(POLICY, shape), Tokens.random(200, group, shape)
    begin, end = grow(POLICY, index, 1, tokens, POLICY.plan(150, 50))
    assert (begin, end) == (0, 182)
    query = torch.randn(1, HEADS * group, DIM)
    scores = POLICY.score(index, candidates_of(query, {1: (begin, end)}, layer=1, extra=30))
    assert scores.shape == (1, HEADS, end + 30)
    assert (scores[0, :, end:] == float("-inf")).all()
    for head in range(HEADS):
        heads, keys = query[0, head * group : (head + 1) * group], tokens.keys[1, head, :end]
        assert (scores[0, head, :end] >= (keys @ heads.T).sum(dim=1) - 1e-4).all()
        for first in range(0, end, 16):
            page, found = keys[first : first + 16], scores[0, head, first : min(first + 16, end)]
            # Channel by channel the most that any key of the page gives, for each head by itself.
            bound = (heads[:, None] * page).amax(dim=1).sum()
            torch.testing.assert_close(found, bound.expand(len(page)))


def test_the_open_page_is_taken_and_the_last_of_the_others_is_cut() -> None:
    index, tokens = new_index(POLICY), Tokens.random(86, 0)
    tokens.keys[:, :, 68, 3] = 50.0
    tokens.keys[:, :, 20, 3] = 40.0
    span = grow(POLICY, index, 0, tokens, POLICY.plan(80, 32))
    assert span == (0, 70)
    query = torch.zeros(1, 2 * HEADS, DIM)
    query[..., 3] = 1.0
    taken = [*range(22, 32), *range(64, 70)]
    assert select(POLICY, index, query, {0: span}, layer=1, k=16) == [[taken] * 2]


@pytest.mark.parametrize("num_prompt", [96, 101, 122])
def test_pages_that_grow_are_as_those_of_a_longer_prompt(num_prompt: int) -> None:
    grown, whole, tokens = new_index(POLICY), new_index(POLICY), Tokens.random(170, 0)
    span = grow(POLICY, grown, 1, tokens, POLICY.plan(num_prompt, 50))
    assert grow(POLICY, whole, 1, tokens, POLICY.plan(170, 50)) == span
    for name in ("key_min", "key_max"):
        pages = getattr(grown, name)[1, :, :, :10]
        assert torch.equal(pages, getattr(whole, name)[1, :, :, :10])
        assert not pages.isnan().any()
        assert getattr(grown, name)[1, :, :, 10:].isnan().all()
