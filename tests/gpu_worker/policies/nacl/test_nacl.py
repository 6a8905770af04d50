"""NACL: the best tokens by their proxies, and a sample of the others by the softmax of their scores."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from gpu_worker.policies.nacl.policy import NACL
from gpu_worker.policies.retain import LayerRows

DIM = 8


def random_rows(
    policy: NACL, group_size: int, num_kv_heads: int = 2, length: int = 60, seed: int = 0
) -> LayerRows:
    """Every KV head has the same keys and queries."""
    generator = torch.Generator().manual_seed(group_size)
    rows = torch.randn(length, 2 * DIM, generator=generator).repeat(num_kv_heads, 1, 1)
    width = policy.num_queries(policy.plan(length, length // 2))
    queries = torch.randn(group_size, width, DIM, generator=generator).repeat(num_kv_heads, 1, 1)
    return LayerRows.of_prompt(1, 4, rows, queries, 1.0, seed)


def kept(policy: NACL, rows: LayerRows, budget: int) -> list[list[int]]:
    retained = policy.compress(rows, policy.plan(rows.num_tokens, budget), budget)
    return retained.positions.tolist()


def exact_scores(rows: LayerRows) -> list[float]:
    """Weight from all proxies in float64, the first KV head's."""
    num_tokens, (_, width, _) = rows.num_tokens, rows.queries.shape
    total = torch.zeros(num_tokens).double()
    for queries in rows.queries[: rows.group_size].double():
        for place, query in enumerate(queries):
            visible = num_tokens - width + place + 1
            total[:visible] += (rows.keys[0, :visible].double() @ query * rows.scale).softmax(dim=0)
    return (total / rows.group_size).tolist()


def best(scores: list[float], candidates: range, count: int) -> set[int]:
    return set(sorted(candidates, key=lambda token: scores[token])[len(candidates) - count :])


@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_the_best_are_kept_under_every_seed_and_the_others_change(group_size: int) -> None:
    policy = NACL(num_sink=4, protected_share=0.1, proxy_share=0.1)
    rows = random_rows(policy, group_size)
    # Sinks and last tokens that score well take no one's place.
    rows.keys[:, [0, -2, -1]] = 3 * rows.queries[::group_size, -1:]
    # 4 sinks, 2 last tokens, 12 best, 7 sampled.
    always = {0, 1, 2, 3, 58, 59} | best(exact_scores(rows), range(4, 58), 12)
    drawn = set()
    for seed in range(20):
        for head in kept(policy, replace(rows, seed=seed), 25):
            assert head == sorted(set(head))
            assert len(head) == 25
            assert always <= set(head)
            drawn.add(frozenset(set(head) - always))
    assert len(drawn) > 30


def test_samples_are_drawn_without_replacement_by_the_softmax_of_the_scores() -> None:
    policy = NACL(num_sink=1, protected_share=0.0, proxy_share=0.9, sampled_share=2 / 3)
    rows = random_rows(policy, group_size=2, num_kv_heads=5000, length=30)
    # One sink, the best one, two sampled of the 28 that are left.
    scores = exact_scores(rows)
    always = {0} | best(scores, range(1, 30), 1)
    rest = [token for token in range(30) if token not in always]
    weight = {token: math.exp(scores[token]) for token in rest}
    total, expected = sum(weight.values()), dict.fromkeys(rest, 0.0)
    for one, two in permutations(rest, 2):
        probability = weight[one] / total * weight[two] / (total - weight[one])
        expected[one] += probability
        expected[two] += probability
    # The scores tell the tokens apart by far more than the draws' noise.
    assert max(expected.values()) > 0.2
    drawn = dict.fromkeys(rest, 0)
    for head in kept(policy, rows, 4):
        for token in set(head) - always:
            drawn[token] += 1
    assert sum(drawn.values()) == 2 * 5000
    for token in rest:
        assert drawn[token] / 5000 == pytest.approx(expected[token], abs=0.02)


def test_a_seed_and_a_layer_have_one_answer() -> None:
    policy = NACL(num_sink=4, proxy_share=0.1)
    rows = random_rows(policy, group_size=2, seed=2**64 - 1)
    first, second = kept(policy, rows, 25)
    assert kept(policy, rows, 25) == [first, second]
    # The same scores, drawn from once for each head.
    assert first != second
    assert kept(policy, replace(rows, seed=3), 25) != [first, second]
    assert kept(policy, replace(rows, layer=2), 25) != [first, second]


def test_without_sampling_it_is_the_best_alone() -> None:
    policy = NACL(num_sink=4, proxy_share=0.1, sampled_share=0.0)
    rows = random_rows(policy, group_size=3)
    expected = {0, 1, 2, 3} | best(exact_scores(rows), range(4, 60), 16)
    assert [set(head) for head in kept(policy, rows, 20)] == [expected] * 2


def test_a_short_prompt_has_no_window_and_keeps_its_middle() -> None:
    policy = NACL()
    plan = policy.plan(1000, 200)
    assert (plan.num_sink, plan.num_recent, plan.num_selected) == (50, 0, 150)
    rows = random_rows(policy, group_size=1, length=1000)
    for head in kept(policy, rows, 200):
        assert head[:50] == list(range(50))
        assert len(set(head)) == 200


@pytest.mark.parametrize("budget", [15, 25, 44])
def test_the_split_is_of_the_layers_own_budget(budget: int) -> None:
    policy = NACL(num_sink=4, protected_share=0.1, proxy_share=0.1)
    rows, plan = random_rows(policy, group_size=2), policy.plan(60, 25)
    # 7 of 19 selected tokens are sampled.
    num_selected = budget - 6
    num_best = num_selected - round(num_selected * 7 / 19)
    always = {0, 1, 2, 3, 58, 59} | best(exact_scores(rows), range(4, 58), num_best)
    shared = set(range(60))
    for seed in range(40):
        for head in policy.compress(replace(rows, seed=seed), plan, budget).positions.tolist():
            assert len(head) == budget
            assert always <= set(head)
            shared &= set(head)
    # Nothing else is kept whatever is drawn.
    assert shared == always
