"""Ada-KV: heads that score higher keep more of their layer's budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.kernels.best_rows import best_rows
from gpu_worker.policies.base import Plan
from gpu_worker.policies.hyper_parameters import Share
from gpu_worker.policies.retain import LayerRows, Retained
from gpu_worker.policies.rounding import round_to_sum
from gpu_worker.policies.scored import ScoredPolicy, finite, keep_best
from gpu_worker.policies.wrapper import AllocationPolicy


@dataclass(frozen=True, slots=True)
class AdaKV(AllocationPolicy):
    """A layer's budget goes to its heads by a common ranking of their tokens (Feng et al., Ada-KV, section 3).

    inner: a policy that keeps what it scores best, with scores that can be compared between heads. Whatever else its
    `keep` does, such as Scissorhands' while decoding, is left out. For a schedule over the layers take
    `LayerWise(AdaKV(inner))`, or an inner policy that has one, `AdaKV(PyramidKV())`; a `LayerWise` inside has no scores
    to rank. alpha: the share of the budget that is divided equally among the heads.
    """

    inner: ScoredPolicy
    alpha: Share = 0.2

    @property
    def name(self) -> str:
        return f"{self.inner.name}+adakv"

    def most_kept(self, plan: Plan, budget: int, num_kv_heads: int) -> int:
        num_selected = plan.of_layer(budget).num_selected or 0
        # Of what the others do not have anyway; rounded up.
        most = budget + int((1 - self.alpha) * (num_kv_heads - 1) * num_selected) + 1
        return min(most, plan.num_prompt_tokens)

    def keep(self, rows: LayerRows, plan: Plan) -> Retained:
        scores = self.inner.score(rows, plan)
        total = len(rows.keys) * (plan.num_selected or 0)
        # What pads a head stands below the sinks.
        fixed = (rows.positions < plan.num_sink) | (rows.positions >= rows.num_tokens - plan.num_recent)
        won = num_won(finite(scores.first).masked_fill(fixed, float("-inf")), scores.second, total)
        alike = level_shares((~fixed).sum(dim=1), total)
        # Neither is more than a head has between sinks and window, nor then is their mean, rounded up or down.
        shares = (1 - self.alpha) * won.double() + self.alpha * alike
        return keep_best(rows, plan, scores, round_to_sum(shares, total))


def num_won(first: Tensor, second: Tensor | None, num_best: int) -> Tensor:
    """How many of the `num_best` best scores of all heads each head has: int64 [H] from [H, n]. Ties by `second`, then
    the higher place, so that heads with the same scores win alike."""
    counts = torch.full_like(first[0, :1], num_best, dtype=torch.int64)
    ties = None if second is None else second.T.reshape(1, -1)
    heads = best_rows(first.T.reshape(1, -1), counts, num_best, ties)[0] % len(first)
    return torch.zeros(len(first), dtype=torch.int64, device=first.device).scatter_add_(
        0, heads, torch.ones_like(heads)
    )


def level_shares(num_candidates: Tensor, total: int) -> Tensor:
    """The same for every head, or all that it has where that is less: float64 [H] of sum `total`, from int64 [H]."""
    fewest_first = num_candidates.double().sort().values
    num_left = torch.arange(len(fewest_first), 0, -1, device=fewest_first.device)
    # The level rises with every head that is below it, and would fall with any other.
    level = ((total - fewest_first.cumsum(0) + fewest_first) / num_left).max()
    return num_candidates.double().clamp(max=level)
