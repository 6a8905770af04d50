"""Oracle: exact top-k by attention weight, the ceiling of every selecting method."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_worker.kernels.top_k import outside
from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.hyper_parameters import SplitShare, SplitTokens
from gpu_worker.policies.recall import Candidates, RecallPolicy


@dataclass(frozen=True, slots=True)
class Oracle(RecallPolicy[None]):
    """All tokens; the top k by exact attention weight (Zhang et al., PQCache, section 4.1.3).

    num_sink, recent_ratio: as for PQCache. Every token stays resident, because the scores read all keys.
    """

    num_sink: SplitTokens = 32
    recent_ratio: SplitShare = 0.5

    name = "oracle"

    def split(self, plan: Plan) -> Plan:
        return replace(plan.split_by_ratio(self.num_sink, self.recent_ratio), all_resident=True)

    def allocate(self, shape: CacheShape) -> None:
        return None

    def score(self, index: None, candidates: Candidates) -> Tensor:
        keys, num_tokens = candidates.exact_keys()
        weights = exact_weights(candidates.query, keys, num_tokens, candidates.scale)
        weights = weights[..., : candidates.num_positions]
        return weights.masked_fill(candidates.outside()[:, None], float("-inf"))


def exact_weights(query: Tensor, keys: Tensor, num_tokens: Tensor, scale: float) -> Tensor:
    """Softmax weight of every token, summed over each GQA group: float32 [B, H_kv, M], 0 beyond num_tokens.

    query: [B, H_q, d]. keys: [B, H_kv, M, d]. num_tokens: int64 [B], at least 1.
    """
    batch, num_kv_heads, num_positions, head_dim = keys.shape
    grouped = query.float().view(batch, num_kv_heads, -1, head_dim)
    scores = grouped @ keys.float().transpose(-1, -2) * scale
    unwritten = outside(num_positions, torch.zeros_like(num_tokens), num_tokens)
    return scores.masked_fill(unwritten[:, None, None], float("-inf")).softmax(dim=-1).sum(dim=2)
