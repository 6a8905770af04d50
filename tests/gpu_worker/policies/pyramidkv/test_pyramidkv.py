"""PyramidKV: SnapKV's choice with budgets that fall from layer to layer."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.policies.pyramidkv.policy import PyramidKV
from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.snapkv.policy import SnapKV


def schedule(policy: PyramidKV, num_prompt: int, budget: int, num_layers: int) -> list[int]:
    plan = policy.plan(num_prompt, budget)
    return [policy.layer_budget(plan, layer, num_layers) for layer in range(num_layers)]


def test_the_papers_schedule() -> None:
    # 100 are selected on average: 195 in the first layer, 5 in the last, 10 fewer from one to the next.
    assert schedule(PyramidKV(), 10000, 132, 20) == [32 + 195 - 10 * layer for layer in range(20)]
    # 190 in the first layer and 10 in the last.
    assert schedule(PyramidKV(beta=10), 10000, 132, 3) == [222, 132, 42]


def test_a_short_prompts_first_layer_keeps_it_whole_and_the_last_has_the_rest() -> None:
    # 118 candidates, 100 selected on average: 118 and 82.
    assert schedule(PyramidKV(), 150, 132, 4) == [150, 138, 126, 114]
    # 195 candidates are just what the first layer would select.
    assert schedule(PyramidKV(), 227, 132, 2) == [227, 37]
    assert schedule(PyramidKV(), 226, 132, 2) == [226, 38]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 28, 32, 33])
@pytest.mark.parametrize("beta", [1, 1.5, 3, 20, 1000])
def test_budgets_fall_within_the_prompt_and_add_up(beta: float, num_layers: int) -> None:
    for num_prompt in (3, 10, 40, 129, 1000):
        for budget in {2, 3, 7, 33, 64, 100, num_prompt // 5, num_prompt // 2, num_prompt - 1}:
            policy = PyramidKV(beta=beta)
            plan = policy.plan(num_prompt, budget)
            if budget < 2 or not plan.selects:
                continue
            budgets = schedule(policy, num_prompt, budget, num_layers)
            assert sum(budgets) == num_layers * budget
            assert budgets == sorted(budgets, reverse=True)
            assert budgets[0] <= num_prompt
            assert budgets[-1] >= plan.num_recent


@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_each_layer_keeps_snapkvs_choice_of_its_own_budget(group_size: int) -> None:
    generator = torch.Generator().manual_seed(group_size)
    rows = torch.randn(2, 90, 16, generator=generator)
    queries = torch.randn(2 * group_size, 6, 8, generator=generator)
    policy, snapkv = PyramidKV(window=6, kernel=3), SnapKV(window=6, kernel=3)
    plan = policy.plan(90, 20)
    assert plan == snapkv.plan(90, 20)
    for layer, budget in enumerate(schedule(policy, 90, 20, 5)):
        layer_rows = LayerRows.of_prompt(layer, 5, rows, queries, 0.4)
        retained = policy.compress(layer_rows, plan, budget)
        assert retained.counts.tolist() == [budget, budget]
        assert torch.equal(retained.positions, snapkv.compress(layer_rows, plan, budget).positions)
        assert retained.positions[:, -6:].tolist() == [list(range(84, 90))] * 2


def test_a_prompt_that_the_budget_covers_has_it_in_every_layer() -> None:
    assert schedule(PyramidKV(), 100, 100, 4) == [100] * 4
