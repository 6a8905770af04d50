"""PyramidKV: SnapKV with more tokens in the lower layers than in the upper ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from gpu_worker.policies.base import Plan
from gpu_worker.policies.hyper_parameters import Between
from gpu_worker.policies.rounding import round_to_sum
from gpu_worker.policies.snapkv.policy import SnapKV


@dataclass(frozen=True, slots=True)
class PyramidKV(SnapKV):
    """As SnapKV, with budgets that fall from layer to layer (Cai et al., PyramidKV, section 4).

    beta: the mean layer selects so many times what the last one does. The other fields are SnapKV's.
    """

    # Below 1 the last layer would select more than the mean.
    beta: Annotated[float, Between(1, 1000)] = 20

    name = "pyramidkv"

    def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
        return pyramid_budget(plan, layer, num_layers, self.beta)


def pyramid_budget(plan: Plan, layer: int, num_layers: int, beta: float) -> int:
    """Tokens kept in one layer, sinks and window included; over the layers the mean is the plan's exactly.

    Selected tokens fall linearly, the mean layer's being `beta` times the last one's, which has one at least. Where the
    first would select more than the prompt has, it selects all, and the last ones have the rest.
    """
    mean = plan.num_selected
    if not mean or num_layers == 1:
        return plan.budget_tokens
    num_candidates = plan.num_prompt_tokens - plan.num_sink - plan.num_recent
    first = min(2 * mean - max(1.0, mean / beta), num_candidates)
    shares = torch.linspace(first, 2 * mean - first, num_layers, dtype=torch.float64)
    selected = round_to_sum(shares, num_layers * mean)
    return plan.budget_tokens - mean + int(selected[layer])
