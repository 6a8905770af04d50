"""Knorm with recall: the tokens with the shortest keys are attended, and all stay recallable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.recall import Candidates, Leaving, PrefilledLayer, RecallPolicy
from gpu_worker.policies.rounding import rounded


@dataclass(frozen=True, slots=True)
class NormIndex:
    """norms: float32 [seats, L, H_kv, N], of the keys by position."""

    norms: Tensor


@dataclass(frozen=True, slots=True)
class KnormRecall(RecallPolicy[NormIndex]):
    """All tokens; those with the shortest keys are recalled (Devoto et al., L2 norm based KV cache compression).

    num_sink, recent_ratio: as for `Knorm`.
    """

    num_sink: int = 4
    recent_ratio: float = 0.5

    name = "knorm_recall"

    def split(self, plan: Plan) -> Plan:
        return plan.split_by_ratio(self.num_sink, self.recent_ratio)

    def allocate(self, shape: CacheShape) -> NormIndex:
        return NormIndex(shape.seated(shape.max_model_len, dtype=torch.float32))

    def observe_prefill(self, index: NormIndex, prefilled: PrefilledLayer) -> None:
        norms = rounded(prefilled.keys.float().norm(dim=-1))
        index.norms[prefilled.seat, prefilled.layer, :, : norms.shape[1]] = norms

    def extend(self, index: NormIndex, leaving: Leaving) -> None:
        leaving.write(index.norms, rounded(leaving.read_keys().float().norm(dim=-1)))

    def score(self, index: NormIndex, candidates: Candidates) -> Tensor:
        norms = index.norms[candidates.seats, candidates.layer, :, : candidates.num_positions]
        return (-norms).masked_fill(candidates.outside()[:, None], float("-inf"))
