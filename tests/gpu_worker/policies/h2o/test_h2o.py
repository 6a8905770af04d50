"""H2O: what gathered most weight stays, from the prompt's queries on and at every decode step."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from decode_loop import Slots, Stream, decode

from gpu_worker.policies.h2o.policy import H2O, H2OCompensated
from gpu_worker.policies.retain import StepSlots


def gathered(stream: Stream, head: int, num_tokens: int) -> list[float]:
    """Weight from every query of a prompt, in float64."""
    total = [0.0] * num_tokens
    for query in range(num_tokens):
        for position, weight in enumerate(stream.weights(head, query, range(query + 1))):
            total[position] += weight
    return total


def published(
    policy: H2O, stream: Stream, head: int, num_prompt: int, budget: int, steps: int
) -> list[list[int]]:
    """The published loop over lists: what is kept after the prompt and after every step."""
    plan = policy.plan(num_prompt, budget)
    total = gathered(stream, head, num_prompt)
    middle = list(range(plan.num_sink, num_prompt - plan.num_recent))
    num_heavy = plan.budget_tokens - plan.num_sink - plan.num_recent
    heavy = sorted(middle, key=lambda position: (total[position], position))[-num_heavy:]
    fixed = [*range(plan.num_sink), *range(num_prompt - plan.num_recent, num_prompt)]
    scores = {position: total[position] for position in [*fixed, *heavy]}
    history = [sorted(scores)]
    for token in range(num_prompt, num_prompt + steps):
        if len(scores) > plan.budget_tokens:
            middle = [position for position in scores if plan.num_sink <= position < token - plan.num_recent]
            del scores[min(middle, key=lambda position: (scores[position], position))]
        scores[token] = 0.0
        positions = sorted(scores)
        for position, weight in zip(positions, stream.weights(head, token, positions), strict=True):
            scores[position] += weight
        history.append(positions)
    return history


@pytest.mark.parametrize("group_size", [1, 3, 4])
@pytest.mark.parametrize(
    "policy", [H2O(), H2O(num_sink=3, recent_ratio=0.3), H2OCompensated(num_sink=2)], ids=repr
)
def test_decoding_keeps_what_the_published_loop_keeps(policy: H2O, group_size: int) -> None:
    """Two sequences of two layers, of unequal lengths and budgets, are one batch."""
    lengths, budgets, steps = [40, 31], [12, 9], 25
    plans = [policy.plan(length, budget) for length, budget in zip(lengths, budgets, strict=True)]
    width = max(plan.budget_tokens for plan in plans) + 3
    batch = [
        [
            Slots(policy, plan, Stream.random(2 * b + layer, 80, group_size), width, plan.budget_tokens + 1)
            for layer in range(2)
        ]
        for b, plan in enumerate(plans)
    ]
    wanted = [
        [
            [published(policy, slots.stream, head, lengths[b], budgets[b], steps) for head in range(2)]
            for slots in layers
        ]
        for b, layers in enumerate(batch)
    ]
    for step in range(steps + 1):
        for layers, of_layers in zip(batch, wanted, strict=True):
            for slots, of_heads in zip(layers, of_layers, strict=True):
                assert [slots.kept(head) for head in range(2)] == [history[step] for history in of_heads]
        decode(batch)
    # Some token of the prompt's middle outlived all that left the window.
    assert any(plans[0].num_sink <= position < 30 for position in batch[0][0].kept(0))


def slots_of(positions: list[int], scores: list[float], begin: int, end: int) -> StepSlots:
    return StepSlots(
        torch.tensor(positions).view(1, 1, 1, -1),
        torch.tensor(scores).view(1, 1, 1, -1),
        torch.tensor([begin]),
        torch.tensor([end]),
        torch.tensor([max(positions) + 1]),
    )


def test_the_least_between_sinks_and_window_goes_and_of_equals_the_oldest() -> None:
    policy = H2O(num_sink=1)
    assert policy.evict(slots_of([0, 9, 5, 7, -1], [0.0, 0.1, 2.0, 1.0, 0.0], 1, 9)).slots.tolist() == [[[3]]]
    # Token 6 came into an earlier slot than token 5.
    assert policy.evict(slots_of([0, 6, 9, 5, 7], [0.0, 1.0, 0.1, 1.0, 2.0], 1, 9)).slots.tolist() == [[[3]]]
    # Padding and what is not full get some slot.
    nothing = policy.evict(slots_of([-1, 3, 4], [0.0, 1.0, 1.0], 0, 3)).slots
    assert 0 <= int(nothing) < 3


@pytest.mark.parametrize("num_prompt", [159, 160, 1000, 10032])
def test_the_compensated_budget_is_the_papers_and_the_plan_says_so(num_prompt: int) -> None:
    """rho of the prompt behind 32 sinks, and a 128th of it on top."""
    budget = 32 + (num_prompt - 32) // 5
    rho = Fraction(budget - 32, num_prompt - 32)
    plan = H2OCompensated().plan(num_prompt, budget)
    assert plan.budget_tokens == int((rho + Fraction(1, 128)) * (num_prompt - 32)) + 32
    assert plan.num_selected == plan.budget_tokens - plan.num_sink - plan.num_recent
    assert plan.num_recent == (plan.budget_tokens - plan.num_sink) // 2
    assert H2OCompensated().plan(20, 12).budget_tokens == 12
    assert not H2OCompensated().plan(1000, 995).selects
