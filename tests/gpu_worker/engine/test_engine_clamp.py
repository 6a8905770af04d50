"""Distances that end at the window: a naive decoder turns the keys of all that is before it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from engine_rig import HEAD_DIM, Rig, make_model, random_prompt, request, small_policies
from naive_decoder import greedy
from torch import Tensor

from gpu_worker.caches import HotCacheSize
from gpu_worker.models import KeyShift
from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.recall import Candidates, RecallPolicy
from gpu_worker.state.batch import Buckets

PROMPT, BUDGET, STEPS, NUM_SINK, WINDOW = 120, 30, 40, 4, 10


@dataclass(frozen=True)
class EveryThird(RecallPolicy[None]):
    """Selects the latest of the candidates whose position is a multiple of 3."""

    clamp_distance: bool = True

    name = "every_third"

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_selected = budget_tokens - NUM_SINK - WINDOW
        return Plan(num_prompt_tokens, budget_tokens, NUM_SINK, WINDOW, num_selected)

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        return num_tokens - WINDOW

    def max_window(self, plan: Plan) -> int:
        return WINDOW

    def allocate(self, shape: CacheShape) -> None:
        return None

    def score(self, index: None, candidates: Candidates) -> Tensor:
        every = torch.arange(candidates.num_positions)
        scores = (every - 1000 * (every % 3 > 0)).float()
        is_there = (every >= candidates.begin[:, None]) & (every < candidates.end[:, None])
        return scores.masked_fill(~is_there, float("-inf"))[:, None].expand(-1, 2, -1).contiguous()


def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
    end = len(keys) - 1 - WINDOW
    thirds = [position for position in range(NUM_SINK, end) if position % 3 == 0]
    return [*range(NUM_SINK), *thirds[-(BUDGET - NUM_SINK - WINDOW) :], *range(end, len(keys))]


def clamped(queries: Tensor, past: Tensor, positions: list[int], attention: Tensor) -> Tensor:
    shift = KeyShift.of(make_model().config.rope, torch.device("cpu"))
    taken, new = past[positions], len(past) - 1
    nearer = (new - torch.tensor(positions) - WINDOW).clamp(min=0)
    keys = shift.apply(taken[:, :HEAD_DIM], nearer)
    return (queries @ keys.T * HEAD_DIM**-0.5).softmax(-1) @ taken[:, HEAD_DIM:]


@pytest.mark.parametrize("hot_cache", [HotCacheSize(), HotCacheSize(tokens=1)])
def test_what_is_before_the_window_is_attended_as_if_it_stood_right_before_it(
    hot_cache: HotCacheSize,
) -> None:
    model, prompt = make_model(), random_prompt(PROMPT)
    policies = {**small_policies(), "every_third": EveryThird()}
    rig = Rig(model, policies=policies, hot_cache=hot_cache, tokens_per_slab=256)
    # As on a GPU, where rows are padded: three sequences in four.
    rig.engine.caches.buckets = Buckets(is_exact=False)
    found, *_ = rig.run(
        request("one", "every_third", BUDGET, max_tokens=STEPS),
        request("two", "every_third", BUDGET, prompt=90, max_tokens=STEPS + 9),
        request("three", "every_third", BUDGET, prompt=70, max_tokens=5),
    )
    expected = greedy(model, prompt, STEPS, attended, clamped)[0]
    assert found.tokens == expected
    assert expected != greedy(model, prompt, STEPS, attended)[0]
    assert rig.records["two"].tokens == greedy(model, random_prompt(90), STEPS + 9, attended, clamped)[0]
    rig.check_empty()
