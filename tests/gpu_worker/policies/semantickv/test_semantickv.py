"""SemanticKV: what queries of large norm look at is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from gpu_worker.policies.observed import weight_tiles
from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.semantickv import policy as semantickv
from gpu_worker.policies.semantickv.policy import SemanticKV, listed

LENGTH, DIM, BUDGET = 100, 8, 16
POLICY = SemanticKV(num_sink=2)
# With 2 sinks and a window of one token, 13 tokens are selected: the last query wants just these.
WANTED_BY_LAST = set(range(60, 73))
STRONG_QUERY, NEEDLE, LATER_NEEDLE = 40, 10, 50


def needle_rows(group_size: int, needles: tuple[int, ...] = (NEEDLE, NEEDLE), seed: int = 0) -> LayerRows:
    """Two KV heads. In each, one query head's query at STRONG_QUERY is the longest of all and looks at its needle, and
    as much at LATER_NEEDLE, which lies in its future; all others look at WANTED_BY_LAST."""
    rows = torch.zeros(2, LENGTH, 2 * DIM)
    queries = torch.zeros(2 * group_size, LENGTH, DIM)
    rows[:, sorted(WANTED_BY_LAST), 0] = 10
    queries[..., 0] = 1
    for head, needle in enumerate(needles):
        rows[head, needle, 1] = 10
        rows[head, LATER_NEEDLE, 1] = 10
        queries[head * group_size, STRONG_QUERY] = 0
        queries[head * group_size, STRONG_QUERY, 1] = 3
    return LayerRows.of_prompt(0, 2, rows, queries, 1.0, seed)


def random_rows(group_size: int, num_kv_heads: int = 2, width: int = 40, seed: int = 0) -> LayerRows:
    generator = torch.Generator().manual_seed(group_size)
    rows = torch.randn(num_kv_heads, 40, 2 * DIM, generator=generator)
    queries = torch.randn(num_kv_heads * group_size, 40, DIM, generator=generator)
    return LayerRows.of_prompt(1, 4, rows, queries[:, 40 - width :], 0.5, seed)


def kept(policy: SemanticKV, rows: LayerRows, budget: int = BUDGET) -> list[set[int]]:
    retained = policy.compress(rows, policy.plan(rows.num_tokens, budget), budget)
    assert retained.counts.tolist() == [budget] * rows.keys.shape[0]
    return [set(head) for head in retained.positions.tolist()]


def exact_scores(policy: SemanticKV, rows: LayerRows) -> torch.Tensor:
    """The definition, query by query, in float64; the best are those of largest norm."""
    num_kv_heads, num_tokens, _ = rows.keys.shape
    width, per_head = rows.queries.shape[1], []
    num_recent = max(1, int(policy.recent_share * num_tokens))
    num_semantic = math.ceil(policy.semantic_share * num_tokens)
    for head, queries in enumerate(rows.queries.double()):
        strongest = queries.norm(dim=-1).argsort(descending=True)[:num_semantic].tolist()
        voters = set(strongest) | set(range(width - num_recent, width))
        votes, seen = torch.zeros(num_tokens).double(), torch.zeros(num_tokens).double()
        for voter in voters:
            visible = num_tokens - width + voter + 1
            keys = rows.keys[head // rows.group_size, :visible].double()
            votes[:visible] += (keys @ queries[voter] * rows.scale).softmax(dim=0)
            seen[:visible] += 1
        per_head.append(votes / (seen if policy.count_corrected else len(voters)))
    scores = torch.stack(per_head).view(num_kv_heads, -1, num_tokens).mean(dim=1)
    return scores if policy.head_wise else scores.mean(dim=0).expand(num_kv_heads, -1)


@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_what_the_longest_query_looks_at_is_kept(group_size: int) -> None:
    rows = needle_rows(group_size)
    for head in kept(POLICY, rows):
        assert {0, 1, NEEDLE, LENGTH - 1} <= head
        assert len(head & WANTED_BY_LAST) == 12
    for policy in (replace(POLICY, semantic_share=0.0), replace(POLICY, by_norm=False)):
        assert kept(policy, rows) == [{0, 1, LENGTH - 1} | WANTED_BY_LAST] * 2


def test_each_head_keeps_its_own_tokens_or_all_share_them() -> None:
    rows = needle_rows(group_size=2, needles=(10, 20))
    first, second = kept(POLICY, rows)
    assert 10 in first - second
    assert 20 in second - first
    first, second = kept(replace(POLICY, head_wise=False), rows)
    assert first == second
    assert {10, 20} <= first


@pytest.mark.parametrize("count_corrected", [False, True])
@pytest.mark.parametrize("head_wise", [True, False])
@pytest.mark.parametrize("width", [40, 12])
@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_scores_are_mean_weights_over_semantic_and_recent_queries(
    group_size: int, width: int, head_wise: bool, count_corrected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = SemanticKV(1, 0.2, 0.16, head_wise=head_wise, count_corrected=count_corrected)
    rows = random_rows(group_size, width=width)
    plan = policy.plan(40, 20)
    scores = policy.score(rows, plan).first
    torch.testing.assert_close(scores.double(), exact_scores(policy, rows), atol=1e-6, rtol=1e-5)
    monkeypatch.setattr(semantickv, "weight_tiles", partial(weight_tiles, max_weights=1))
    torch.testing.assert_close(policy.score(rows, plan).first, scores)


def test_sinks_and_window_are_kept_only_when_reserved() -> None:
    rows = needle_rows(group_size=1)
    assert all({0, 1, LENGTH - 1} <= head for head in kept(POLICY, rows))
    # 13 selected tokens and the window, as before.
    without_sinks = kept(replace(POLICY, reserve_sinks=False), rows, BUDGET - 2)
    assert without_sinks == [{NEEDLE, LENGTH - 1} | (head & WANTED_BY_LAST) for head in without_sinks]
    rows.keys[:, -1, 0] = -10
    assert all(LENGTH - 1 in head for head in kept(POLICY, rows))
    # The last query still votes: what it wants is kept, but not its own token.
    without_recent = kept(replace(POLICY, reserve_recent=False), rows)
    assert without_recent == [{0, 1, NEEDLE} | WANTED_BY_LAST] * 2


def test_random_queries_follow_the_seed_and_the_layer() -> None:
    policy = SemanticKV(num_sink=1, semantic_share=0.1, by_norm=False)
    rows, plan = random_rows(group_size=2, seed=2**64 - 1), policy.plan(40, 20)
    scores = policy.score(rows, plan).first
    assert torch.equal(policy.score(rows, plan).first, scores)
    for other in (replace(rows, seed=5), replace(rows, layer=2)):
        assert not torch.equal(policy.score(other, plan).first, scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [2, 3, 5, 20, 39])
def test_a_budget_is_kept_exactly(budget: int, dtype: torch.dtype) -> None:
    policy = SemanticKV(recent_share=0.1)
    rows = random_rows(group_size=3)
    rows = replace(rows, keys=rows.keys.to(dtype), queries=rows.queries.to(dtype))
    plan = policy.plan(40, budget)
    assert plan.num_selected is not None
    assert plan.num_selected >= 1
    always = set(range(plan.num_sink)) | set(range(40 - plan.num_recent, 40))
    for head in kept(policy, rows, budget):
        assert always <= head


def test_of_equally_long_queries_the_later_vote_whatever_the_last_bits_say() -> None:
    """The first layer's queries of one token differ by their rotation only."""
    rows = random_rows(group_size=2)
    policy = SemanticKV(num_sink=2, semantic_share=0.25)
    queries = rows.queries / rows.queries.norm(dim=-1, keepdim=True)
    queries[:, 10:34] *= 3
    for seed in range(20):
        noise = 1 + 1e-7 * torch.randn(queries.shape, generator=torch.Generator().manual_seed(seed))
        voters = policy.voters(replace(rows, queries=queries * noise))
        assert [head.nonzero().flatten().tolist() for head in voters] == [[*range(24, 34), 39]] * 4


def test_voters_are_listed_in_order_and_padded() -> None:
    is_voter = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    for width, pads in (3, []), (5, [-1, -1]):
        rest = [-1, -1, *pads]
        assert listed(is_voter, width).tolist() == [[1, 3, 4, *pads], [4, *rest], [-1, *rest]]


def test_pooled_scores_keep_a_needles_neighbours() -> None:
    plain, pooled = (kept(replace(POLICY, kernel=kernel), needle_rows(1))[0] for kernel in (1, 5))
    assert NEEDLE in plain & pooled
    assert not plain.intersection((NEEDLE - 2, NEEDLE + 2))
    assert pooled.issuperset(range(NEEDLE - 2, NEEDLE + 3))
