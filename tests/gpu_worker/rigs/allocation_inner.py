"""A retain policy whose every answer is known, to be wrapped by an allocation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.policies.base import Plan
from gpu_worker.policies.retain import Gift, LayerRows, ScoredPolicy, Scores, StepSlots

NUM_SINK, NUM_RECENT = 2, 3


@dataclass(frozen=True, slots=True)
class Given(ScoredPolicy):
    """Keeps what these scores say: first, second: [H, n]. Its hooks return what no other policy would."""

    first: Tensor
    second: Tensor | None = None

    name = "given"
    evicts = True
    observes = True
    gives = True
    has_degrees = True

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_selected = budget_tokens - NUM_SINK - NUM_RECENT
        return Plan(num_prompt_tokens, budget_tokens, NUM_SINK, NUM_RECENT, num_selected)

    def num_queries(self, plan: Plan) -> int:
        return 71

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        return 72 + num_tokens

    def max_window(self, plan: Plan) -> int:
        return 73

    def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
        return 1000 * num_layers + layer

    def interval(self, plan: Plan) -> int:
        return 74

    def room(self, plan: Plan, num_decoded: int) -> int:
        return 75 + num_decoded

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        return Scores(self.first, self.second, kept=self.first + 1)

    def evict(self, slots: StepSlots) -> Tensor:
        return slots.positions.argmin(dim=-1)

    def give(self, slots: StepSlots, evicted: Tensor) -> Gift:
        return Gift(slots.positions + evicted[..., None], slots.begin.float())

    def observe(self, scores: Tensor, weights: Tensor, marks: Tensor) -> None:
        scores += weights * marks[:, None, None]


def layer_rows(num_heads: int, num_tokens: int) -> LayerRows:
    generator = torch.Generator().manual_seed(num_tokens)
    rows = torch.randn(num_heads, num_tokens, 8, generator=generator)
    return LayerRows.of_prompt(0, 1, rows, torch.empty(num_heads, 0, 4), 0.5)


def step_slots() -> StepSlots:
    positions = torch.tensor([5, 3, 9, 4]).view(1, 1, 1, 4)
    one = torch.ones(1, dtype=torch.int64)
    return StepSlots(positions, None, 2 * one, 8 * one, 12 * one)
