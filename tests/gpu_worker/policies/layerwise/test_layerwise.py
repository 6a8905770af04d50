"""Layer-wise allocation: a falling schedule for any policy, which is otherwise as it was."""

from __future__ import annotations

import torch
from allocation_inner import Given

from gpu_worker.policies.layerwise.policy import LayerWise
from gpu_worker.policies.pyramidkv.policy import PyramidKV
from gpu_worker.policies.snapkv.policy import SnapKV
from gpu_worker.policies.streaming_llm.policy import StreamingLLM

GIVEN = Given(torch.zeros(1, 1))


def test_budgets_fall_linearly_over_what_sinks_and_window_leave() -> None:
    policy = LayerWise(GIVEN, beta=4)
    # 40 are selected: 70 of the first layer, 10 of the last; 5 are sinks and window.
    plan = policy.plan(1000, 45)
    assert [policy.layer_budget(plan, layer, 5) for layer in range(5)] == [75, 60, 45, 30, 15]


def test_sinks_count_when_a_layer_would_select_more_than_the_prompt_has() -> None:
    policy = LayerWise(GIVEN)
    # 45 candidates: the first layer selects them all, the last 2 * 30 - 45.
    plan = policy.plan(50, 35)
    assert [policy.layer_budget(plan, layer, 4) for layer in range(4)] == [50, 40, 30, 20]


def test_a_policy_without_a_choice_has_its_budget_in_every_layer() -> None:
    window = LayerWise(StreamingLLM())
    plan = window.plan(500, 50)
    assert {window.layer_budget(plan, layer, 8) for layer in range(8)} == {50}
    everything = LayerWise(SnapKV())
    plan = everything.plan(50, 500)
    assert {everything.layer_budget(plan, layer, 8) for layer in range(8)} == {500}


def test_the_schedule_is_pyramidkvs_and_replaces_the_inner_one() -> None:
    pyramid = PyramidKV(beta=7)
    plan = pyramid.plan(4000, 400)
    expected = [pyramid.layer_budget(plan, layer, 9) for layer in range(9)]
    for inner in (SnapKV(), PyramidKV()):
        assert [LayerWise(inner, beta=7).layer_budget(plan, layer, 9) for layer in range(9)] == expected
