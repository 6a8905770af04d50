"""BitKeys: rotated keys of two bits a coordinate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from policy_index import SHAPE, Tokens, candidates_of, check_seats_apart, grow, new_index, select

from gpu_worker.policies.bitkeys.policy import BitKeys
from gpu_worker.policies.recall import PrefilledLayer
from kv_store.client import RowFormat

POLICY = BitKeys()
HEADS = SHAPE.num_kv_heads


def test_the_budget_is_few_sinks_a_short_window_and_selection() -> None:
    plan = POLICY.plan(1000, 104)
    assert (plan.num_sink, plan.num_recent, plan.num_selected) == (4, 10, 90)
    assert POLICY.max_window(plan) == 10
    assert not POLICY.plan(104, 104).selects
    plan = BitKeys(num_sink=0, recent_ratio=0.0).plan(1000, 104)
    assert (plan.num_sink, plan.num_recent, plan.num_selected) == (0, 0, 104)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_most_of_the_weight_is_found_whatever_channels_carry(head_dim: int) -> None:
    shape = replace(SHAPE, row_format=RowFormat(head_dim, "fp32"), scale=head_dim**-0.5)
    index, tokens = new_index(POLICY, shape), Tokens.random(400, 0, shape)
    # A channel that is large in all keys, and one that varies more than others.
    tokens.keys[..., 3] += 30.0
    tokens.keys[..., 11] *= 8.0
    begin, end = grow(POLICY, index, 1, tokens, POLICY.plan(360, 60))
    assert (begin, end) == (4, 395)
    query = torch.randn(1, 4, head_dim, generator=torch.Generator().manual_seed(2))
    candidates = candidates_of(query, {1: (begin, end)}, layer=1, extra=9)
    scores = POLICY.score(index, replace(candidates, scale=shape.scale))
    assert (scores[0, :, end:] == float("-inf")).all()
    for head in range(HEADS):
        logits = query[0, 2 * head : 2 * head + 2] @ tokens.keys[1, head, :end].T * shape.scale
        weights = logits.softmax(-1).sum(0)
        found = weights[scores[0, head].topk(40).indices].sum()
        assert found > 0.9 * weights[begin:].topk(40).values.sum()


def test_a_token_that_leaves_the_window_is_found_where_it_stands() -> None:
    index, tokens = new_index(POLICY), Tokens.random(120, 0)
    tokens.keys[:, 0, [30, 95]] = 9.0
    tokens.keys[:, 1, [44, 102]] = -9.0
    span = grow(POLICY, index, 0, tokens, POLICY.plan(90, 44))
    assert span == (4, 116)
    query = torch.ones(1, 2 * HEADS, SHAPE.head_dim)
    query[0, HEADS:] = -1.0
    assert select(POLICY, index, query, {0: span}, layer=1, k=2) == [[[30, 95], [44, 102]]]


def test_keys_that_tie_go_to_the_later() -> None:
    index, tokens = new_index(POLICY), Tokens.random(96, 0)
    tokens.keys[:] = 1.0
    span = grow(POLICY, index, 0, tokens, POLICY.plan(96, 24))
    query = torch.ones(1, 2 * HEADS, SHAPE.head_dim)
    last = list(range(span[1] - 10, span[1]))
    assert select(POLICY, index, query, {0: span}, layer=0, k=10) == [[last, last]]


def test_a_prompt_that_its_budget_covers_is_not_coded() -> None:
    index, tokens = new_index(POLICY), Tokens.random(50, 0)
    grow(POLICY, index, 0, tokens, POLICY.plan(50, 50))
    assert (index.codes == 113).all()


@pytest.mark.parametrize(("num_candidates", "step"), [(16383, 1), (16384, 2), (30000, 3)])
def test_values_of_a_long_prompt_are_fitted_on_evenly_spaced_tokens(num_candidates: int, step: int) -> None:
    shape = replace(SHAPE, max_model_len=32768, num_layers=1, max_num_seqs=1)
    plan = POLICY.plan(4 + num_candidates + 10, 104)
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(HEADS, plan.num_prompt_tokens, 2 * SHAPE.head_dim, generator=generator)
    keys, values = rows.chunk(2, dim=-1)
    some, of_some = keys[:, 4:-10:step].double(), values[:, 4:-10:step].double()
    others = torch.ones(num_candidates, dtype=torch.bool)
    others[::step] = False
    values[:, 4:-10][:, others] = math.nan
    index = new_index(POLICY, shape)
    POLICY.observe_prefill(index, PrefilledLayer(0, 0, plan, keys, values, keys[:, :0]))
    products = (some - some.mean(dim=1, keepdim=True)).mT @ (of_some - of_some.mean(dim=1, keepdim=True))
    torch.testing.assert_close(index.value_means[0, 0].double(), of_some.mean(dim=1), rtol=1e-3, atol=1e-5)
    expected = products / some.shape[1]
    torch.testing.assert_close(index.slopes[0, 0].double(), expected, rtol=1e-2, atol=1e-4)


def test_seats_are_apart() -> None:
    check_seats_apart(POLICY, num_tokens=120, budget=50, k=32)
