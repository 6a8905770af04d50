"""SparQ: the query's few largest channels approximate its inner products with every key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.hyper_parameters import Between, SplitShare, SplitTokens
from gpu_worker.policies.recall import Candidates, Leaving, PrefilledLayer, RecallPolicy

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SparQIndex:
    """keys: [seats, L, H_kv, d, N] in their dtype, by position, a channel's values side by side."""

    keys: Tensor


@dataclass(frozen=True, slots=True)
class SparQ(RecallPolicy[SparQIndex]):
    """All tokens; the top k by some channels of the keys (Ribar et al., SparQ Attention, section 4).

    num_channels: r, how many are read at a step: those with the largest |q|, summed over the GQA group. 1 is what
    PQCache is compared with, 1/128 of the keys. num_sink, recent_ratio: as for PQCache. The paper's third step,
    by which the mean of all values stands for what is not attended, is left out, as where PQCache compares.

    The second copy of the keys takes half as much again as the cache.
    """

    num_channels: Annotated[int, Between(1, 1024)] = 1
    num_sink: SplitTokens = 32
    recent_ratio: SplitShare = 0.5

    name = "sparq"

    def split(self, plan: Plan) -> Plan:
        return plan.split_by_ratio(self.num_sink, self.recent_ratio)

    def allocate(self, shape: CacheShape) -> SparQIndex:
        return SparQIndex(shape.seated(shape.head_dim, shape.max_model_len, dtype=shape.dtype))

    def observe_prefill(self, index: SparQIndex, prefilled: PrefilledLayer) -> None:
        end = self.window_begin(prefilled.plan, prefilled.keys.shape[1])
        index.keys[prefilled.seat, prefilled.layer, :, :, :end] = prefilled.keys[:, :end].transpose(1, 2)

    def extend(self, index: SparQIndex, leaving: Leaving) -> None:
        leaving.write(index.keys.mT, leaving.read_keys())

    def score(self, index: SparQIndex, candidates: Candidates) -> Tensor:
        weights = self._scores(index, candidates).softmax(dim=-1).sum(dim=2)
        return weights.masked_fill(candidates.outside()[:, None], float("-inf"))

    def _reduced(self, index: SparQIndex, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """The channels that are read, int64 [B, H_kv, r], and the queries in them, scaled: float32
        [B, H_kv, group, r]."""
        batch, _, head_dim = candidates.query.shape
        query = candidates.query.float().view(batch, index.keys.shape[2], -1, head_dim)
        magnitude = query.abs()
        # Of equals the lower channel.
        order = magnitude.sum(dim=2).argsort(dim=-1, descending=True, stable=True)
        channels = order[..., : self.num_channels]
        chosen = channels[:, :, None].expand(-1, -1, query.shape[2], -1)
        # A head's temperature grows with the share of its query that was left out.
        share = magnitude.gather(-1, chosen).sum(dim=-1) / magnitude.sum(dim=-1).clamp(min=EPS)
        scale = candidates.scale / share.clamp(min=EPS).sqrt()
        return channels, query.gather(-1, chosen) * scale[..., None]

    def _scores(self, index: SparQIndex, candidates: Candidates) -> Tensor:
        """Approximate scores: float32 [B, H_kv, group, N], -inf for what is no candidate."""
        channels, query = self._reduced(index, candidates)
        num_positions, heads = (
            candidates.num_positions,
            torch.arange(index.keys.shape[2], device=query.device),
        )
        at_layer = index.keys[:, candidates.layer, :, :, :num_positions]
        keys = at_layer[candidates.seats[:, None, None], heads[:, None], channels].float()
        return (query @ keys).masked_fill(candidates.outside()[:, None, None], float("-inf"))
