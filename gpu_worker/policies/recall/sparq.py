"""SparQ: the query's few largest channels approximate its inner products with every key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.kernels.pq_score.reference import outside
from gpu_worker.policies.base import CacheShape, Plan, sink_tokens, split_budget
from gpu_worker.policies.recall.base import Candidates, RecallPolicy

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SparQIndex:
    """keys: [seats, L, H_kv, d, N] in their dtype, by position, a channel's values side by side."""

    keys: Tensor


@dataclass(frozen=True, slots=True)
class SparQ(RecallPolicy[SparQIndex]):
    """Top-k by some channels of the keys (Ribar et al., SparQ Attention, section 4).

    num_channels: r, how many are read at a step: those with the largest |q|, summed over the GQA group. 1 is what
    PQCache is compared with, 1/128 of the keys. num_sink, recent_ratio: as for PQCache.

    The paper's mean value, which stands in for all that is not attended, is not added: PQCache's comparison goes
    without it, and attention is the engine's. The second copy of the keys takes half as much again as the cache.
    """

    num_channels: int = 1
    num_sink: int = 32
    recent_ratio: float = 0.5

    name = "sparq"

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_sink = sink_tokens(self.num_sink, budget_tokens)
        num_recent = int((budget_tokens - num_sink) * self.recent_ratio)
        return split_budget(num_prompt_tokens, budget_tokens, num_sink, num_recent)

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        return max(plan.num_sink, num_tokens - plan.num_recent)

    def max_window(self, plan: Plan) -> int:
        return plan.num_recent

    def allocate(self, shape: CacheShape) -> SparQIndex:
        return SparQIndex(shape.seated(shape.head_dim, shape.max_model_len, dtype=shape.dtype))

    def observe_prefill(
        self, index: SparQIndex, seat: int, layer: int, plan: Plan, keys: Tensor, queries: Tensor
    ) -> None:
        end = self.window_begin(plan, keys.shape[1])
        index.keys[seat, layer, :, :, :end] = keys[:, :end].transpose(1, 2)

    def extend(
        self, index: SparQIndex, seats: Tensor, layers: range, positions: Tensor, keys: Tensor
    ) -> None:
        at_layers, columns = index.keys[:, layers.start : layers.stop], positions.clamp(min=0)
        # A row without a token writes back what is there.
        old = at_layers[seats, :, :, :, columns]
        is_present = (positions >= 0)[:, None, None, None]
        at_layers[seats, :, :, :, columns] = keys.to(old.dtype).where(is_present, old)

    def score(self, index: SparQIndex, candidates: Candidates) -> Tensor:
        num_positions, num_kv_heads = candidates.num_positions, index.keys.shape[2]
        batch, _, head_dim = candidates.query.shape
        query = candidates.query.float().view(batch, num_kv_heads, -1, head_dim)
        magnitude = query.abs()
        # [B, H_kv, r]; of equals the lower channel.
        order = magnitude.sum(dim=2).argsort(dim=-1, descending=True, stable=True)
        channels = order[..., : self.num_channels]
        heads = torch.arange(num_kv_heads, device=query.device)[:, None]
        at_layer = index.keys[:, candidates.layer, :, :, :num_positions]
        keys = at_layer[candidates.seats[:, None, None], heads, channels].float()

        chosen = channels[:, :, None].expand(-1, -1, query.shape[2], -1)
        # A head's temperature grows with the share of its query that was left out.
        share = magnitude.gather(-1, chosen).sum(dim=-1) / magnitude.sum(dim=-1).clamp(min=EPS)
        scale = candidates.scale / share.clamp(min=EPS).sqrt()
        scores = (query.gather(-1, chosen) * scale[..., None]) @ keys
        masked = outside(num_positions, candidates.begin, candidates.end)[:, None]
        weights = scores.masked_fill(masked[:, None], float("-inf")).softmax(dim=-1).sum(dim=2)
        return weights.masked_fill(masked, float("-inf"))
