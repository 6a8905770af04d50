"""CaM: what leaves the window gives its value to those behind it, by a coin that its weight tosses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_loop import DIM, Slots, Stream, decode
from torch import Tensor

from gpu_worker.policies.cam.policy import CaM, bequest, uniform
from gpu_worker.policies.retain import LayerRows, StepSlots
from gpu_worker.policies.streaming_llm.policy import StreamingLLM


def is_given(policy: CaM, position: int, head: int, layer: int, weight: float, window: list[float]) -> bool:
    """The coin of one token, as published: a Bernoulli variable of a clamped ratio."""
    chance = min(1.0, weight / (sum(window) / len(window)))
    return float(uniform(policy.seed, torch.tensor(position), torch.tensor(head), layer)) < chance


def published(
    policy: CaM, stream: Stream, head: int, layer: int, num_prompt: int, budget: int, steps: int
) -> list[dict[int, Tensor]]:
    """The published loop over lists: values by position, after the prompt and after every step."""
    plan = policy.plan(num_prompt, budget)
    values = dict(enumerate(stream.values[head, :num_prompt].double()))
    weights = [0.0] * num_prompt
    for query in range(num_prompt - policy.window_size, num_prompt):
        for position, weight in enumerate(stream.weights(head, query, range(query + 1))):
            weights[position] += weight
    window = weights[num_prompt - plan.num_recent :]

    def leave(position: int, last: int, weight: float, window: list[float]) -> None:
        value = values.pop(position)
        if is_given(policy, position, head, layer, weight, window):
            for heir in range(position + 1, min(position + policy.merge_size, last) + 1):
                values[heir] = values[heir] + value / policy.merge_size

    for position in range(plan.num_sink, num_prompt - plan.num_recent):
        leave(position, position + plan.num_recent, weights[position], window)
    history, latest = [dict(values)], dict(enumerate(weights))
    for token in range(num_prompt, num_prompt + steps):
        if len(values) > budget:
            behind = [latest[position] for position in range(token - plan.num_recent, token)]
            leaving = token - plan.num_recent - 1
            leave(leaving, token - 1, latest[leaving], behind)
        values[token] = stream.values[head, token].double()
        positions = sorted(values)
        latest = dict(zip(positions, stream.weights(head, token, positions), strict=True))
        history.append(dict(values))
    return history


@pytest.mark.parametrize("group_size", [1, 3, 4])
@pytest.mark.parametrize("merge_size", [1, 3, 32])
def test_decoding_gives_what_the_published_loop_gives(group_size: int, merge_size: int) -> None:
    """Two sequences of two layers, of unequal lengths and budgets, are one batch; windows above and below m."""
    policy = CaM(num_sink=3, merge_size=merge_size, window_size=4, seed=group_size)
    lengths, budgets, steps = [60, 31], [14, 9], 20
    batch, wanted = [], []
    for b, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
        plan, streams = (
            policy.plan(length, budget),
            [Stream.random(9 * b + i, 90, group_size) for i in range(2)],
        )
        batch.append([Slots(policy, plan, streams[i], 17, budget + 1, layer=i) for i in range(2)])
        wanted += [
            [published(policy, streams[layer], head, layer, length, budget, steps) for head in range(2)]
            for layer in range(2)
        ]
    for step in range(steps + 1):
        every = [slots for layers in batch for slots in layers]
        for slots, of_heads in zip(every, wanted, strict=True):
            for head, history in enumerate(of_heads):
                assert slots.kept(head) == sorted(history[step])
                for position, value in history[step].items():
                    found = slots.values[head, slots.of(head, position)]
                    torch.testing.assert_close(found, value.float(), atol=1e-4, rtol=1e-4)
        decode(batch)
    gained = [
        (history[-1][position] - slots.stream.values[head, position]).abs().max() > 1e-3
        for slots, of_heads in zip(every, wanted, strict=True)
        for head, history in enumerate(of_heads)
        for position in history[-1]
    ]
    assert any(gained)
    assert not all(gained)


def in_order(values: Tensor, share: Tensor, reach: int) -> Tensor:
    """Compute what positions behind a run of tokens are given, one token after another."""
    run = torch.cat([values.double(), torch.zeros(values.shape[0], reach, values.shape[2]).double()], dim=1)
    for token in range(values.shape[1]):
        run[:, token + 1 : token + 1 + reach] += share[:, token, None, None] * run[:, token, None]
    return run[:, values.shape[1] :].float()


@pytest.mark.parametrize("reach", [1, 2, 5, 32])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 31, 64, 65, 1300])
@pytest.mark.parametrize("chance", [0.5, 1.0])
def test_gifts_are_passed_on_in_the_order_of_positions(reach: int, num_tokens: int, chance: float) -> None:
    """Also over more tokens than are solved together, of which all give all that they have or half of them do."""
    generator = torch.Generator().manual_seed(num_tokens)
    values = torch.randn(2, num_tokens, 3, generator=generator)
    share = (torch.rand(2, num_tokens, generator=generator) < chance) / reach
    torch.testing.assert_close(
        bequest(values, share, reach), in_order(values, share, reach), atol=1e-3, rtol=1e-4
    )


def prompt(weight_of_leaving: float, group_size: int = 1) -> tuple[LayerRows, Tensor]:
    """A sink, token 1 that leaves, and a window of four; the last query looks at all, at token 1 so much more."""
    keys = torch.zeros(1, 6, DIM)
    keys[0, 1, 0] = weight_of_leaving
    values = torch.eye(6, DIM)[None]
    queries = torch.eye(1, DIM).expand(group_size, 1, DIM)
    return LayerRows.of_prompt(0, 1, torch.cat([keys, values], dim=-1), queries, 1.0), values[0]


@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_a_token_of_more_weight_than_the_windows_mean_gives_and_one_of_none_does_not(group_size: int) -> None:
    policy = CaM(num_sink=1, merge_size=2, window_size=1)
    plan = policy.plan(6, 5)
    for weight, share in [(3.0, 0.5), (-60.0, 0.0)]:
        rows, values = prompt(weight, group_size)
        retained = policy.compress(rows, plan, 5)
        assert retained.positions.tolist() == [[0, 2, 3, 4, 5]]
        wanted = values[[0, 2, 3, 4, 5]]
        wanted[1:3] += share * values[1]
        assert torch.equal(retained.values[0], wanted)
        assert torch.equal(retained.keys[0], rows.keys[0, [0, 2, 3, 4, 5]])


def test_coins_fall_as_often_as_they_should_and_alike_when_asked_again() -> None:
    positions, heads = torch.arange(20000), torch.arange(8)[:, None]
    coins = uniform(3, positions, heads, 5)
    assert coins.min() >= 0
    assert coins.max() < 1
    for chance in (0.1, 0.5, 0.9):
        assert abs((coins < chance).double().mean() - chance) < 5e-3
    assert torch.equal(coins[3, 7000:7010], uniform(3, positions[7000:7010], torch.tensor(3), 5))
    others = [
        uniform(4, positions, heads, 5),
        uniform(3, positions, heads, 6),
        uniform(3, positions + 1, heads, 5),
    ]
    for other in [*others, uniform(3, positions, heads + 1, 5)]:
        assert abs(torch.corrcoef(torch.stack([coins.flatten(), other.flatten()]))[0, 1]) < 0.02


def step(scores: list[float]) -> StepSlots:
    """Sink 0, token 4 that leaves, window 5 to 8 in a jumble, an empty slot."""
    return StepSlots(
        torch.tensor([7, 4, 5, 0, 8, -1, 6]).view(1, 1, 1, -1),
        torch.tensor(scores).view(1, 1, 1, -1),
        torch.tensor([1]),
        torch.tensor([5]),
        torch.tensor([9]),
    )


def test_heirs_are_the_next_tokens_wherever_they_lie() -> None:
    policy, slots = CaM(merge_size=3), step([0.1, 0.5, 0.1, 0.0, 0.1, 0.0, 0.1])
    given_up = policy.evict(slots)
    evicted, gift = given_up.slots, given_up.gift
    assert evicted.tolist() == [[[1]]]
    assert gift is not None
    assert sorted(gift.slots.flatten().tolist()) == [0, 2, 6]
    torch.testing.assert_close(gift.share, torch.full((1, 1, 1), 1 / 3))
    # Four are in the window, and still each gets a share of 1/32.
    gift = CaM().gift(slots, evicted)
    assert sorted(gift.slots.flatten().tolist()) == [-1] * 28 + [0, 2, 4, 6]
    assert gift.share.item() == 1 / 32
    # An empty slot, a sink and a token of the window have no heirs.
    for place in (5, 3, 2):
        assert (policy.gift(slots, torch.tensor([[[place]]])).slots == -1).all()


@pytest.mark.parametrize("group_size", [1, 3, 4])
@pytest.mark.parametrize("budget", [1, 2, 9, 40])
def test_what_is_kept_is_streaming_llms_and_repeats_under_a_seed(group_size: int, budget: int) -> None:
    policy, stream = CaM(), Stream.random(3, 50, group_size)
    plan = policy.plan(50, budget)
    rows = stream.prompt(policy, plan)
    rows = replace(rows, values=rows.values.bfloat16())
    retained, again = policy.compress(rows, plan, budget), policy.compress(rows, plan, budget)
    assert torch.equal(retained.positions, StreamingLLM().compress(rows, plan, budget).positions)
    assert retained.counts.tolist() == [budget] * 2
    assert retained.values.dtype == torch.bfloat16
    assert torch.equal(retained.values, again.values)
    seeds = [policy.compress(replace(rows, seed=seed), plan, budget).values.float() for seed in range(8)]
    assert plan.num_recent < 2 or any(not torch.equal(values, seeds[0]) for values in seeds)
