"""SnapKV: what the window's queries look at is kept, with its neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.snapkv.policy import SnapKV


def window_looks_at(num_tokens: int, weights: dict[int, float], group_size: int, window: int) -> LayerRows:
    """One KV head whose every query weighs these positions so much, and any other 1, before the softmax."""
    rows = torch.zeros(1, num_tokens, 8)
    for position, weight in weights.items():
        rows[0, position, 0] = math.log(weight)
    queries = torch.zeros(group_size, window, 4)
    queries[..., 0] = 1.0
    return LayerRows.of_prompt(0, 1, rows, queries, 1.0)


def kept(policy: SnapKV, rows: LayerRows, budget: int) -> list[list[int]]:
    plan = policy.plan(rows.num_tokens, budget)
    return policy.compress(rows, plan, budget).positions.tolist()


@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_a_needle_is_kept_with_its_neighbours(group_size: int) -> None:
    rows = window_looks_at(100, {40: 1000.0}, group_size, 5)
    expected = [[38, 39, 40, 41, 42, *range(95, 100)]]
    assert kept(SnapKV(window=5, kernel=5), rows, 10) == expected
    assert kept(SnapKV(window=5, kernel=5, pooling="avg"), rows, 10) == expected


def test_of_tokens_that_share_a_maximum_the_needle_goes_first_and_then_the_later() -> None:
    rows = window_looks_at(100, {40: 1000.0}, 1, 2)
    policy = SnapKV(window=2, kernel=7)
    assert kept(policy, rows, 4) == [[40, 43, 98, 99]]
    rows = window_looks_at(100, {40: 1000.0, 41: 3.0}, 1, 2)
    assert kept(policy, rows, 5) == [[40, 41, 43, 98, 99]]


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_scores_are_the_pooled_means_of_the_windows_weights(group_size: int, pooling: str) -> None:
    generator = torch.Generator().manual_seed(group_size)
    num_tokens, window, kernel, scale = 50, 6, 5, 0.7
    rows = torch.randn(2, num_tokens, 8, generator=generator)
    queries = torch.randn(2 * group_size, window, 4, generator=generator)
    policy = SnapKV(window, kernel, pooling)
    plan = policy.plan(num_tokens, 20)
    scores = policy.score(LayerRows.of_prompt(0, 1, rows, queries, scale), plan)
    prefix = num_tokens - window
    for head in range(2):
        votes = torch.zeros(num_tokens, dtype=torch.float64)
        for query_head in range(group_size * head, group_size * (head + 1)):
            for place in range(window):
                seen = prefix + place + 1
                query: Tensor = queries[query_head, place].double()
                votes[:seen] += (rows[head, :seen, :4].double() @ query * scale).softmax(0) / group_size
        padded = [0.0] * 2 + votes[:prefix].tolist() + [0.0] * 2
        near = [padded[position : position + kernel] for position in range(prefix)]
        expected = [max(some) if pooling == "max" else sum(some) / kernel for some in near]
        got = scores.first[head, :prefix].double()
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-5)


def test_what_is_kept_stays() -> None:
    plan = SnapKV().plan(10000, 1024)
    assert not SnapKV().evicts
    assert SnapKV().recompression(plan) is None
