"""Outlier heads keep everything, and the total is what it was."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from gpu_worker.policies.base import Plan
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.outlier_heads.policy import OutlierHeads
from gpu_worker.policies.retain import LayerRows, Recompression, Retained
from gpu_worker.policies.scored import ScoredPolicy, Scores
from gpu_worker.policies.streaming_llm.policy import StreamingLLM

DIM = 8
CHELSEA = Chelsea(num_sink=2, num_recent=4, chunk=16, interval_tokens=10)


@dataclass(frozen=True, slots=True)
class ByNorm(ScoredPolicy):
    """Keeps the longest keys; lower layers keep more where `slope` is not 0. Its notes are carried."""

    slope: int = 0

    name = "by_norm"

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        return Plan(num_prompt_tokens, budget_tokens, 2, 4, budget_tokens - 6)

    def num_queries(self, plan: Plan) -> int:
        return 3

    def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
        return plan.budget_tokens + self.slope * (num_layers - 1 - 2 * layer)

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        norms = rows.keys.norm(dim=-1)
        return Scores(norms, notes=norms)


def rows_of(layer: int, num_layers: int, num_heads: int, num_tokens: int, group_size: int = 1) -> LayerRows:
    generator = torch.Generator().manual_seed(layer)
    rows = torch.randn(num_heads, num_tokens, 2 * DIM, generator=generator)
    queries = torch.randn(num_heads * group_size, 0, DIM)
    return LayerRows.of_prompt(layer, num_layers, rows, queries, 0.3)


def compressed(policy: OutlierHeads, num_layers: int, num_tokens: int, budget: int) -> list[Retained]:
    plan = policy.plan(num_tokens, budget)
    return [
        policy.compress(
            rows_of(layer, num_layers, policy.num_kv_heads, num_tokens),
            plan,
            policy.layer_budget(plan, layer, num_layers),
        )
        for layer in range(num_layers)
    ]


@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_outlier_heads_keep_all_rows_and_the_others_are_padded(group_size: int) -> None:
    policy = OutlierHeads(CHELSEA, frozenset({(1, 0), (1, 2)}), num_kv_heads=4)
    plan = policy.plan(60, 40)
    rows = rows_of(1, 2, 4, 60, group_size)
    retained = policy.compress(rows, plan, policy.layer_budget(plan, 1, 2))
    counts = retained.counts.tolist()
    assert counts[0] == counts[2] == 60
    assert counts[1] == counts[3] < 40
    assert retained.positions.shape == retained.notes.shape == (4, 60)
    for head in (0, 2):
        assert torch.equal(retained.positions[head], torch.arange(60))
        assert torch.equal(retained.keys[head], rows.keys[head])
        assert torch.equal(retained.values[head], rows.values[head])
        assert retained.notes[head].eq(0).all()
    for head in (1, 3):
        assert (retained.positions[head, counts[head] :] == -1).all()
        assert retained.notes[head, : counts[head]].exp().sum().round() == 60
        # It is what the inner policy makes of this head alone, with that budget.
        one = rows_of(1, 2, 4, 60, group_size)
        alone = replace(
            one, keys=one.keys[[head]], values=one.values[[head]], positions=one.positions[[head]]
        )
        expected = CHELSEA.compress(alone, plan, counts[head])
        assert torch.equal(retained.positions[head, : counts[head]], expected.positions[0])
        torch.testing.assert_close(retained.keys[head, : counts[head]], expected.keys[0])
    assert retained.rounds == expected.rounds > 0


@pytest.mark.parametrize("inner", [CHELSEA, ByNorm(), ByNorm(slope=5)], ids=["chelsea", "scored", "pyramid"])
@pytest.mark.parametrize(
    "heads", [set(), {(0, 1)}, {(0, 0), (0, 1), (2, 0)}, {(3, 0), (3, 1), (3, 2)}], ids=len
)
def test_the_total_over_layers_and_heads_stays(inner: Chelsea | ByNorm, heads: set[tuple[int, int]]) -> None:
    policy = OutlierHeads(inner, frozenset(heads), num_kv_heads=3)
    plan = policy.plan(101, 60)
    assert sum(policy.layer_budget(plan, layer, 4) for layer in range(4)) == 4 * 60
    total = 0
    for layer, retained in enumerate(compressed(policy, 4, 101, 60)):
        counts, budget = retained.counts.tolist(), policy.layer_budget(plan, layer, 4)
        assert 3 * budget - 3 < sum(counts) <= 3 * budget
        for head, count in enumerate(counts):
            assert (count == 101) == ((layer, head) in heads)
        total += sum(counts)
    assert 12 * 60 - 12 < total <= 12 * 60
    assert heads or total == 12 * 60


def test_the_others_share_alike_what_the_paper_says_is_left() -> None:
    heads = frozenset({(layer, layer % 8) for layer in range(0, 30, 3)})
    policy, num_layers = OutlierHeads(Chelsea(), heads, num_kv_heads=8), 32
    plan = policy.plan(10000, 2000)
    share = len(heads) / (8 * num_layers)
    expected = (0.2 - share) / (1 - share) * 10000
    for layer in range(num_layers):
        whole = sum(one == layer for one, _ in heads)
        budget = policy.layer_budget(plan, layer, num_layers)
        others = (8 * budget - whole * 10000) // (8 - whole)
        assert abs(others - expected) <= 3


def test_layers_that_keep_more_still_do() -> None:
    policy = OutlierHeads(ByNorm(slope=5), frozenset({(1, 0)}), num_kv_heads=3)
    smallest = [min(retained.counts.tolist()) for retained in compressed(policy, 4, 101, 60)]
    assert smallest == sorted(smallest, reverse=True)
    assert smallest[0] - smallest[-1] > 20


def test_a_budget_that_outliers_alone_exceed_is_refused_with_the_one_that_does() -> None:
    policy = OutlierHeads(CHELSEA, frozenset({(0, 0), (1, 0)}), num_kv_heads=2)
    # Half of the heads keep 100 tokens, the others at least 7.
    with pytest.raises(ValueError, match=r"2 outlier heads of 4 .* 100 .* 54 tokens, and it is 50"):
        policy.layer_budget(policy.plan(100, 50), 0, 2)
    plan = policy.plan(100, 54)
    retained = policy.compress(rows_of(0, 2, 2, 100), plan, policy.layer_budget(plan, 0, 2))
    assert retained.counts.tolist() == [100, 8]


def test_a_layer_of_outliers_only_is_kept_whole() -> None:
    policy = OutlierHeads(CHELSEA, frozenset({(0, 0), (0, 1)}), num_kv_heads=2)
    first, second = compressed(policy, 2, 50, 40)
    assert first.counts.tolist() == [50, 50]
    assert second.counts.tolist() == [30, 30]


def test_heads_that_the_model_lacks_are_refused() -> None:
    for wrong in ((0, 2), (-1, 0)):
        with pytest.raises(ValueError, match="heads are 0 to 1"):
            OutlierHeads(CHELSEA, frozenset({wrong}), num_kv_heads=2)
    policy = OutlierHeads(CHELSEA, frozenset({(5, 1)}), num_kv_heads=2)
    with pytest.raises(ValueError, match="only 4 layers"):
        policy.layer_budget(policy.plan(100, 80), 0, 4)


def test_while_decoding_outlier_heads_are_left_as_they_are() -> None:
    policy = OutlierHeads(CHELSEA, frozenset({(0, 1)}), num_kv_heads=3)
    plan = policy.plan(60, 40)
    assert policy.recompression(plan) == Recompression(10)
    # Ten tokens more in an outlier head, ever again, need slots.
    assert policy.room(plan, 500) == 500
    budget = policy.layer_budget(plan, 0, 2)
    rows = rows_of(0, 2, 3, 60)
    retained = policy.compress(rows, plan, budget)
    kept = retained.counts.tolist()
    # Ten decoded tokens go behind what each head has; the shorter heads are padded.
    longest = max(kept) + 10
    keys, values = torch.full((2, 3, longest, DIM), float("nan"))
    positions = torch.full((3, longest), -1)
    notes = torch.zeros(3, longest)
    new = torch.randn(2, 3, 10, DIM, generator=torch.Generator().manual_seed(4))
    for head, count in enumerate(kept):
        keys[head, : count + 10] = torch.cat([retained.keys[head, :count], new[0, head]])
        values[head, : count + 10] = torch.cat([retained.values[head, :count], new[1, head]])
        positions[head, : count + 10] = torch.cat([retained.positions[head, :count], torch.arange(60, 70)])
        notes[head, :count] = retained.notes[head, :count]
    grown = LayerRows(0, 2, 70, keys, values, positions, rows.queries, 0.3, 0, notes, rounds=retained.rounds)
    later = policy.compress(grown, plan, budget)
    assert later.counts.tolist() == [kept[0], 70, kept[2]]
    assert torch.equal(later.positions[1], torch.arange(70))
    assert torch.equal(later.keys[1], keys[1])
    assert later.notes[1].eq(0).all()
    assert not later.keys.isnan().any()
    for head in (0, 2):
        assert later.notes[head, : kept[head]].exp().sum().round() == 70
        assert later.positions[head, kept[head] - 4 : kept[head]].tolist() == [66, 67, 68, 69]
    assert later.rounds > retained.rounds


def test_scores_of_all_heads_are_carried() -> None:
    policy = OutlierHeads(ByNorm(), frozenset({(0, 1)}), num_kv_heads=2)
    rows = rows_of(0, 2, 2, 50)
    plan = policy.plan(50, 35)
    retained = policy.compress(rows, plan, policy.layer_budget(plan, 0, 2))
    for head, count in enumerate(retained.counts.tolist()):
        expected = rows.keys[head].norm(dim=-1)[retained.positions[head, :count]]
        torch.testing.assert_close(retained.notes[head, :count], expected)


def test_each_head_gets_the_queries_of_its_group() -> None:
    @dataclass(frozen=True, slots=True)
    class ByQuery(ByNorm):
        def score(self, rows: LayerRows, plan: Plan) -> Scores:
            assert len(rows.queries) == 3 * len(rows.keys)
            mine = rows.queries.view(len(rows.keys), 3, -1, DIM).sum(dim=(1, 2))
            return Scores((rows.keys @ mine[..., None])[..., 0])

    rows = replace(rows_of(0, 1, 4, 50), queries=torch.randn(12, 2, DIM))
    policy = OutlierHeads(ByQuery(), frozenset({(0, 2)}), num_kv_heads=4)
    plan = policy.plan(50, 35)
    retained = policy.compress(rows, plan, policy.layer_budget(plan, 0, 1))
    counts = retained.counts.tolist()
    plain = ByQuery().compress(rows, plan, counts[0])
    for head in (0, 1, 3):
        assert retained.positions[head, : counts[head]].tolist() == plain.positions[head].tolist()


def test_all_else_is_the_inner_policy() -> None:
    policy = OutlierHeads(ByNorm(), frozenset(), num_kv_heads=2)
    assert policy.name == "by_norm+outliers"
    assert policy.num_queries(policy.plan(50, 35)) == 3
    chelsea = OutlierHeads(CHELSEA, frozenset(), num_kv_heads=2)
    assert chelsea.name == "chelsea+outliers"
    plan = chelsea.plan(50, 35)
    assert plan == CHELSEA.plan(50, 35)
    assert chelsea.window_begin(plan, 70) == 66
    with pytest.raises(ValueError, match="streaming_llm evicts at every step"):
        OutlierHeads(StreamingLLM(), frozenset(), num_kv_heads=2)
