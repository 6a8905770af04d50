"""Scissorhands: tokens that most queries pass over go, half a budget at a time."""

from __future__ import annotations

import pytest
import torch
from decode_loop import DIM, Slots, Stream, decode

from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.scissorhands.policy import Scissorhands


def kept_best(counters: dict[int, torch.Tensor], num_recent: int, num_tokens: int, count: int) -> list[int]:
    """Those with the smallest counters, of equals the latest, and the last ones."""
    recent = [position for position in counters if position >= num_tokens - num_recent]
    middle = sorted(set(counters) - set(recent), key=lambda position: (counters[position], -position))
    return sorted(middle[: count - len(recent)] + recent)


def published(
    policy: Scissorhands, stream: Stream, head: int, num_prompt: int, budget: int, steps: int
) -> list[list[int]]:
    """The published loop over lists: what is kept after the prompt and every step. It notes which queries passed over a
    token, and counts those of the window when something must go."""
    plan = policy.plan(num_prompt, budget)
    passed_by: dict[int, list[int]] = {position: [] for position in range(num_prompt)}

    def best(num_tokens: int, count: int) -> list[int]:
        counters = {
            position: torch.tensor(sum(query >= num_tokens - policy.window_size for query in queries))
            for position, queries in passed_by.items()
        }
        return kept_best(counters, plan.num_recent, num_tokens, count)

    for query in range(num_prompt - policy.window_size, num_prompt):
        for position, weight in enumerate(stream.weights(head, query, range(query + 1))):
            if weight < 1 / (query + 1):
                passed_by[position].append(query)
    passed_by = {position: passed_by[position] for position in best(num_prompt, budget)}
    history, since = [sorted(passed_by)], 0
    for token in range(num_prompt, num_prompt + steps):
        passed_by[token] = []
        positions = sorted(passed_by)
        for position, weight in zip(positions, stream.weights(head, token, positions), strict=True):
            if weight < 1 / len(positions):
                passed_by[position].append(token)
        since += 1
        if since == budget // 2:
            kept, since = best(token + 1, budget - budget // 2), 0
            passed_by = {position: passed_by[position] for position in kept}
        history.append(sorted(passed_by))
    return history


@pytest.mark.parametrize("group_size", [1, 3, 4])
@pytest.mark.parametrize(
    ("budget", "recent_ratio", "window_size"),
    # A window shorter than what is decoded between two calls, as long, longer, and of many calls.
    [(12, 0.05, 4), (12, 0.05, 6), (13, 0.0, 8), (16, 0.1, 30), (5, 0.1, 21), (7, 0.0, 24)],
)
def test_decoding_keeps_what_the_published_loop_keeps(
    group_size: int, budget: int, recent_ratio: float, window_size: int
) -> None:
    policy, steps = Scissorhands(window_size, recent_ratio), 36
    plan, stream = policy.plan(40, budget), Stream.random(budget, 80, group_size)
    wanted = [published(policy, stream, head, 40, budget, steps) for head in range(2)]
    width = budget + policy.recompression(plan).interval
    slots = Slots(policy, plan, stream, width, width)
    for step in range(steps + 1):
        assert [slots.kept(head) for head in range(2)] == [history[step] for history in wanted]
        decode([[slots]])
    assert wanted[0] != wanted[1]


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


@pytest.mark.parametrize("window_size", [0, 4096])
def test_a_window_that_no_counter_holds_is_refused(window_size: int) -> None:
    with pytest.raises(ValueError, match="window_size"):
        Scissorhands(window_size)


def test_the_papers_defaults_at_a_long_prompt() -> None:
    policy = Scissorhands()
    plan = policy.plan(10000, 2000)
    assert (plan.num_sink, plan.num_recent, plan.num_selected) == (0, 100, 1900)
    assert (policy.num_queries(plan), policy.recompression(plan).interval) == (400, 1000)
    assert policy.num_queries(policy.plan(100, 20)) == 100
    assert policy.recompression(policy.plan(100, 100)) is None
