"""NACL: the tokens that the last queries attend most, and a random sample of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.kernels.best_rows import best_rows
from gpu_worker.policies.base import Plan
from gpu_worker.policies.hyper_parameters import Share, Tokens
from gpu_worker.policies.observed import observed_weight
from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.scored import ScoredPolicy, Scores, finite


@dataclass(frozen=True, slots=True)
class NACL(ScoredPolicy):
    """Tokens that the last queries weigh most, and random ones (Chen et al., NACL).

    Split and defaults are those of its released code, with causal weights and the group's mean.

    num_sink: first tokens kept. protected_share: of the prompt, its sinks and last tokens together, so that a short
    prompt has no window. proxy_share: of the prompt, its last queries, whose weights score it. sampled_share: of the
    selected tokens, those drawn without replacement by the softmax of their scores from what the best ones leave.
    """

    num_sink: Tokens = 256
    protected_share: Share = 0.01
    proxy_share: Share = 0.01
    sampled_share: Share = 7 / 19

    name = "nacl"

    def split(self, plan: Plan) -> Plan:
        num_protected = int(self.protected_share * plan.num_prompt_tokens)
        return plan.split_by_number(self.num_sink, max(0, num_protected - plan.sinks(self.num_sink)))

    def num_queries(self, plan: Plan) -> int:
        return max(1, int(self.proxy_share * plan.num_prompt_tokens)) if plan.selects else 0

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        scores = observed_weight(rows)
        # The largest of score + Gumbel noise are a sample without replacement by the softmax of the scores.
        first = scores + self._gumbel(rows)
        num_selected = plan.num_selected or 0
        num_best = num_selected - round(self.sampled_share * num_selected)
        is_protected = rows.positions < plan.num_sink
        is_protected |= rows.positions >= rows.num_tokens - plan.num_recent
        counts = torch.full_like(scores[:, 0], num_best, dtype=torch.int64)
        best = best_rows(finite(scores).masked_fill(is_protected, float("-inf")), counts, num_best)
        # Before all that are sampled; among themselves by their scores.
        return Scores(first.scatter(1, best, float("inf")), second=scores)

    @staticmethod
    def _gumbel(rows: LayerRows) -> Tensor:
        """Gumbel noise of every row: float32 [H_kv, n]."""
        generator = torch.Generator().manual_seed((rows.seed * rows.num_layers + rows.layer) % 2**64)
        noise = torch.empty(rows.positions.shape).exponential_(generator=generator)
        gumbel = -noise.log()
        device = rows.keys.device
        # The copy is not waited for. PyTorch keeps the pinned memory until it is done.
        return gumbel if device.type == "cpu" else gumbel.pin_memory().to(device, non_blocking=True)
