"""A retain policy whose scores are given, to be wrapped by an allocation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.policies.base import Plan
from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.scored import ScoredPolicy, Scores

NUM_SINK, NUM_RECENT = 2, 3


@dataclass(frozen=True, slots=True)
class Given(ScoredPolicy):
    """Keeps what these scores say: first, second: [H, n]."""

    first: Tensor
    second: Tensor | None = None

    name = "given"

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_selected = budget_tokens - NUM_SINK - NUM_RECENT
        return Plan(num_prompt_tokens, budget_tokens, NUM_SINK, NUM_RECENT, num_selected)

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        return Scores(self.first, self.second, notes=self.first + 1)


def layer_rows(num_heads: int, num_tokens: int) -> LayerRows:
    generator = torch.Generator().manual_seed(num_tokens)
    rows = torch.randn(num_heads, num_tokens, 8, generator=generator)
    return LayerRows.of_prompt(0, 1, rows, torch.empty(num_heads, 0, 4), 0.5)
