"""Scissorhands: tokens that most queries pass over go, half a budget at a time."""

from __future__ import annotations

import pytest
import torch
from decode_loop import DIM, Slots, Stream, decode

from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.scissorhands.policy import Scissorhands


@pytest.mark.parametrize("budget", [2, 3, 12, 13])
def test_a_layer_overshoots_once_by_half_a_budget_and_never_again(budget: int) -> None:
    policy = Scissorhands(window_size=8)
    plan = policy.plan(40, budget)
    interval, width = policy.recompression(plan).interval, 2 * budget
    slots = Slots(policy, plan, Stream.random(1, 120), width, width)
    assert len(slots.kept(0)) == budget
    for _ in range(interval):
        decode([[slots]])
    assert slots.most == budget + interval
    slots.most = 0
    for _ in range(5 * interval):
        assert len(slots.kept(0)) == budget - budget // 2 + slots.since
        decode([[slots]])
    assert slots.most == budget


def test_counters_are_queries_of_less_than_average_weight() -> None:
    """The last four queries of 20: all look at token 3, two of them at token 11 too, and none past themselves."""
    keys = torch.zeros(1, 20, DIM)
    keys[0, 3, 0], keys[0, 11, 1] = 20, 20
    queries = torch.zeros(1, 4, DIM)
    queries[0, :, 0], queries[0, 2:, 1] = 1, 1
    rows = LayerRows.of_prompt(0, 1, torch.cat([keys, keys], dim=-1), queries, 1.0)
    policy = Scissorhands(window_size=4, recent_ratio=0.1)
    retained = policy.compress(rows, policy.plan(20, 8), 8)
    # Of those that all four passed over the latest stay; token 17 was seen by three, and the last two are protected.
    assert retained.positions.tolist() == [[3, 11, 14, 15, 16, 17, 18, 19]]
    counters = policy.score(rows, policy.plan(20, 8)).first[0]
    assert (-counters[retained.positions[0]]).tolist() == [0.0, 2.0, 4.0, 4.0, 4.0, 3.0, 2.0, 1.0]


def test_a_step_counts_what_is_below_the_average_of_what_is_there() -> None:
    policy = Scissorhands(window_size=4)
    scores = torch.tensor([[[2.0, 4.0, 0.0, 0.0]]])
    # Three tokens are visible: 0.3 is below their average, 0.25 would be the average of four.
    policy.observe(scores, torch.tensor([[[0.3, 0.36, 0.34, 0.0]]]), torch.tensor([9]))
    assert scores[..., :3].tolist() == [[[11.0, 4.0, 0.0]]]


def test_a_step_before_the_next_calls_window_counts_nothing() -> None:
    policy = Scissorhands(window_size=40)
    # Calls come every 50 tokens.
    plan = policy.plan(1000, 100)
    again = policy.recompression(plan)
    assert again is not None
    counted = [again.mark(num_left) for num_left in range(1, 51)]
    assert all(counted[:40])
    assert not any(counted[40:])


def test_the_papers_interval_at_a_long_prompt() -> None:
    policy = Scissorhands()
    assert policy.recompression(policy.plan(10000, 2000)).interval == 1000
    assert policy.recompression(policy.plan(100, 100)) is None
