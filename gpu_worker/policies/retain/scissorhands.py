"""Scissorhands: drops, many at a time, the tokens that queries most often pass over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.policies.base import Plan, attend_all
from gpu_worker.policies.retain.base import LayerRows, Retained, ScoredPolicy, Scores
from gpu_worker.policies.retain.observed import group_mean, weight_tiles


@dataclass(frozen=True, slots=True)
class Scissorhands(ScoredPolicy):
    """A token's counter is the number of recent queries whose weight on it was below the average, 1/t of t visible
    tokens; those with the largest counters go first (Liu et al., Scissorhands, section 4; B-A1: no sinks, one shot of
    the whole budget when the prompt is prefilled).

    window_size: queries w that the counter looks back on. recent_ratio: the most recent tokens, as a share of the
    prompt, that never go; cut to a quarter of a small budget.

    While decoding, half a budget goes at once, every half budget of tokens. A layer keeps B at prefill and may grow to
    B + B/2 until the first such call, the decoded tokens on top of the budget as in every one-shot method; that call
    and all later ones leave B - B/2, which refills to B, the token being decoded included.
    """

    window_size: int = 400
    recent_ratio: float = 0.01

    name = "scissorhands"
    observes = True

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_recent = min(int(num_prompt_tokens * self.recent_ratio), budget_tokens // 4)
        if budget_tokens >= num_prompt_tokens:
            return attend_all(num_prompt_tokens, budget_tokens, 0, num_recent)
        return Plan(num_prompt_tokens, budget_tokens, 0, num_recent, budget_tokens - num_recent)

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        # What was decoded long ago may go like the prompt's.
        return max(plan.num_sink, num_tokens - plan.num_recent)

    def num_queries(self, plan: Plan) -> int:
        return min(self.window_size, plan.num_prompt_tokens)

    def interval(self, plan: Plan) -> int:
        return max(1, plan.budget_tokens // 2) if plan.selects else 0

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        is_decoding = rows.num_tokens > plan.num_prompt_tokens
        num_kept = budget - budget // 2 if is_decoding else budget
        return super(Scissorhands, self).compress(rows, plan, num_kept)

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        counters = self._counted(rows) if rows.scores is None else rows.scores
        return Scores(-counters, kept=counters)

    def observe(self, scores: Tensor, weights: Tensor, num_tokens: Tensor) -> None:
        # Only slots with a token have a weight.
        average = 1 / (weights > 0).sum(dim=-1, keepdim=True)
        # A counter of exactly the last w would need w bits a slot; forgetting 1/w at every step looks back as far on
        # the average, and never counts above w either.
        scores.mul_(1 - 1 / self.window_size).add_(weights < average)

    def _counted(self, rows: LayerRows) -> Tensor:
        """The prompt's last queries, each counted fully: float32 [H_kv, n]."""
        num_kv_heads, num_tokens, _ = rows.keys.shape
        counters = torch.zeros(num_kv_heads, num_tokens, device=rows.keys.device)
        every = torch.arange(num_tokens, device=rows.keys.device)
        for weights, positions in weight_tiles(rows):
            last = positions[0, :, None]
            # The mean over the group is compared, for while decoding nothing else is known.
            is_below = group_mean(weights, num_kv_heads) < 1 / (last + 1)
            counters += (is_below & (every <= last)).sum(dim=1)
        return counters
