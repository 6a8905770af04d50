"""Ada-KV: a layer's budget moves to the heads whose tokens score best."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from allocation_inner import NUM_RECENT, NUM_SINK, Given, layer_rows
from torch import Tensor

from gpu_worker.policies.adakv.policy import AdaKV
from gpu_worker.policies.layerwise.policy import LayerWise
from gpu_worker.policies.pyramidkv.policy import PyramidKV
from gpu_worker.policies.retain import Retained

FIXED = NUM_SINK + NUM_RECENT


def kept(retained: Retained) -> list[list[int]]:
    return [[position for position in head if position >= 0] for head in retained.positions.tolist()]


def compress(scores: Tensor, num_selected: int, alpha: float) -> Retained:
    policy, (num_heads, num_tokens) = AdaKV(Given(scores), alpha), scores.shape
    budget = num_selected + FIXED
    return policy.compress(layer_rows(num_heads, num_tokens), policy.plan(num_tokens, num_tokens - 1), budget)


def random_scores(num_heads: int, num_tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Heads differ in how sharp they are, as attention's do.
    sharpness = torch.arange(1, num_heads + 1).view(-1, 1)
    return (torch.randn(num_heads, num_tokens, generator=generator) * sharpness).softmax(dim=1)


@pytest.mark.parametrize(
    ("alpha", "counts"),
    [
        (0.0, [16, 0]),
        # 14.4 and 1.6: the larger remainder goes up.
        (0.2, [14, 2]),
        (0.5, [12, 4]),
        (1.0, [8, 8]),
    ],
)
def test_a_head_that_scores_best_everywhere_has_all_but_the_floor(alpha: float, counts: list[int]) -> None:
    scores = torch.rand(2, 60, generator=torch.Generator().manual_seed(0))
    scores[0] += 1
    retained = compress(scores, 8, alpha)
    assert (retained.counts - FIXED).tolist() == counts


def test_without_a_floor_the_layer_keeps_the_best_of_all_heads() -> None:
    scores = random_scores(4, 50, 1)
    middle = scores[:, NUM_SINK : 50 - NUM_RECENT]
    best = set(middle.flatten().topk(4 * 9).indices.tolist())
    positions = [[place for place in range(45) if head * 45 + place in best] for head in range(4)]
    expected = [[0, 1, *(place + NUM_SINK for place in head), 47, 48, 49] for head in positions]
    assert kept(compress(scores, 9, alpha=0.0)) == expected


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.2, 0.37, 0.5, 1.0])
@pytest.mark.parametrize("num_selected", [0, 1, 7, 30, 44, 45])
def test_the_layer_keeps_its_budget_exactly_and_no_head_more_than_it_has(
    num_selected: int, alpha: float
) -> None:
    for num_heads in (1, 2, 3, 8):
        scores = random_scores(num_heads, 50, num_selected)
        retained = compress(scores, num_selected, alpha)
        assert int(retained.counts.sum()) == num_heads * (num_selected + FIXED)
        policy = AdaKV(Given(scores), alpha)
        most = policy.most_kept(policy.plan(50, 49), num_selected + FIXED, num_heads)
        assert int(retained.counts.max()) <= most <= 50
        # Every head has the floor, and sinks and window on top.
        assert int(retained.counts.min()) >= FIXED + int(alpha * num_selected)
        for head in kept(retained):
            assert head == sorted(set(head))
            assert {0, 1, 47, 48, 49} <= set(head)
        assert torch.equal(retained.positions, compress(scores, num_selected, alpha).positions)


def test_heads_that_score_alike_keep_alike() -> None:
    ties = torch.randint(0, 3, (1, 40), generator=torch.Generator().manual_seed(3)).float().expand(4, -1)
    assert (compress(ties, 11, 0.2).counts == 11 + FIXED).all()
    assert (compress(torch.zeros(4, 40), 11, 0.2).counts == 11 + FIXED).all()


def test_ties_between_heads_go_to_the_second_score() -> None:
    second = torch.zeros(2, 20)
    second[1] = 1
    policy = AdaKV(Given(torch.zeros(2, 20), second), alpha=0.0)
    retained = policy.compress(layer_rows(2, 20), policy.plan(20, 10), 10)
    assert (retained.counts - FIXED).tolist() == [0, 10]


@pytest.mark.parametrize(
    ("num_selected", "counts"),
    [
        # Of 30, 3 are all that head 0 has; the other two have 13.5 alike.
        (10, [3, 13, 14]),
        # Of 45, 14 are all that head 1 has as well: 28 of 29 are left for head 2.
        (15, [3, 14, 28]),
    ],
)
def test_a_head_that_kept_little_before_has_no_more_now(num_selected: int, counts: list[int]) -> None:
    """Compressed again, heads are unequal: 3, 14 and 29 candidates."""
    num_candidates, num_tokens = [3, 14, 29], 29 + FIXED
    positions = torch.full((3, num_tokens), -1)
    for head, count in enumerate(num_candidates):
        middle = range(NUM_SINK, NUM_SINK + count)
        window = range(num_tokens - NUM_RECENT, num_tokens)
        positions[head, : count + FIXED] = torch.tensor([*range(NUM_SINK), *middle, *window])
    scores = torch.rand(3, num_tokens, generator=torch.Generator().manual_seed(4))
    # Head 2's are best, and what pads head 0 would be if it were read.
    scores[2] += 1
    scores[positions < 0] = 100
    rows = replace(layer_rows(3, num_tokens), positions=positions)
    for alpha in (0.0, 0.2, 1.0):
        policy = AdaKV(Given(scores), alpha)
        retained = policy.compress(rows, policy.plan(num_tokens, num_tokens - 1), num_selected + FIXED)
        got = (retained.counts - FIXED).tolist()
        assert sum(got) == 3 * num_selected
        assert all(0 <= some <= most for some, most in zip(got, num_candidates, strict=True))
        if alpha == 1.0:
            assert sorted(got) == counts


def test_what_is_kept_are_the_layers_rows_and_their_scores() -> None:
    scores, rows = random_scores(3, 40, 2), layer_rows(3, 40)
    policy = AdaKV(Given(scores))
    retained = policy.compress(rows, policy.plan(40, 20), 20)
    for head, positions in enumerate(kept(retained)):
        assert torch.equal(retained.keys[head, : len(positions)], rows.keys[head, positions])
        assert torch.equal(retained.values[head, : len(positions)], rows.values[head, positions])
        assert torch.equal(retained.notes[head, : len(positions)], scores[head, positions] + 1)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_the_budget_is_kept_where_a_model_overflows(bad: float) -> None:
    policy = AdaKV(Given(torch.full((3, 40), bad)))
    retained = policy.compress(layer_rows(3, 40), policy.plan(40, 20), 20)
    assert retained.counts.tolist() == [20, 20, 20]


def test_sinks_and_window_are_whole_where_a_budget_is_too_small_for_them() -> None:
    policy = AdaKV(Given(torch.rand(3, 40)))
    plan = policy.plan(40, 20)
    retained = policy.compress(layer_rows(3, 40), plan, 3)
    assert retained.positions.tolist() == [[0, 1, 37, 38, 39]] * 3
    assert policy.most_kept(plan, 5, 3) == policy.most_kept(plan, 3, 3) + 2


def test_a_layers_own_budget_is_what_its_heads_share() -> None:
    scores = random_scores(2, 300, 5)
    outside = LayerWise(AdaKV(Given(scores)))
    assert outside.name == "given+adakv+layerwise"
    plan = outside.plan(300, 60)
    budgets = [outside.layer_budget(plan, layer, 4) for layer in range(4)]
    assert sum(budgets) == 4 * 60
    assert len(set(budgets)) == 4
    for budget in budgets:
        counts = outside.compress(layer_rows(2, 300), plan, budget).counts
        assert int(counts.sum()) == 2 * budget
        assert counts[0] != counts[1]
    inside = AdaKV(PyramidKV())
    plan = inside.plan(3000, 600)
    schedule = [PyramidKV().layer_budget(plan, layer, 4) for layer in range(4)]
    assert [inside.layer_budget(plan, layer, 4) for layer in range(4)] == schedule
