"""PQCache: keys product-quantised at prefill; approximate inner products choose the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.kernels.pq_score import pq_assign, pq_score
from gpu_worker.policies.base import (
    CacheShape,
    Candidates,
    IndexJob,
    Plan,
    RecallPolicy,
    attend_all,
    sink_tokens,
)
from kv_store.client import IndexSegment, PQParams


@dataclass(frozen=True, slots=True)
class PQIndex:
    """codebooks: float32 [seats, L, H_kv, m, 2^b, d/m]. codes: uint8 [seats, L, H_kv, max_model_len, m]."""

    codebooks: Tensor
    codes: Tensor


@dataclass(frozen=True, slots=True)
class PQCache(RecallPolicy[PQIndex]):
    """Top-k by product-quantised keys (Zhang et al., PQCache, sections 3.1 to 3.3).

    num_subvectors: partitions m of a key. num_bits: b, 2^b centroids a partition. num_sink: always attended first
    tokens. recent_ratio: the share of the rest of the budget that goes to the local window. max_iterations: of
    K-means; 0 lets the store bound them by the paper's adaptive rule.
    """

    num_subvectors: int = 2
    num_bits: int = 6
    num_sink: int = 32
    recent_ratio: float = 0.5
    max_iterations: int = 0

    name = "pqcache"

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_sink = sink_tokens(self.num_sink, budget_tokens)
        num_recent = int((budget_tokens - num_sink) * self.recent_ratio)
        num_candidates = num_prompt_tokens - num_sink - num_recent
        if budget_tokens >= num_prompt_tokens or num_candidates < 2**self.num_bits:
            return attend_all(num_prompt_tokens, budget_tokens, num_sink, num_recent)
        num_selected = budget_tokens - num_sink - num_recent
        return Plan(num_prompt_tokens, budget_tokens, num_sink, num_recent, num_selected)

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        return max(plan.num_sink, num_tokens - plan.num_recent)

    def max_window(self, plan: Plan) -> int:
        return plan.num_recent

    def allocate(self, shape: CacheShape) -> PQIndex:
        ksub, dsub = 2**self.num_bits, shape.head_dim // self.num_subvectors
        return PQIndex(
            codebooks=shape.seated(self.num_subvectors, ksub, dsub, dtype=torch.float32),
            codes=shape.seated(shape.max_model_len, self.num_subvectors, dtype=torch.uint8),
        )

    def index_job(self, plan: Plan, begin: int, end: int) -> IndexJob:
        return IndexJob(begin, end, PQParams(self.num_subvectors, self.num_bits, self.max_iterations))

    def load(self, index: PQIndex, seat: int, layer: int, job: IndexJob, segment: IndexSegment) -> None:
        index.codebooks[seat, layer] = torch.tensor(segment.arrays["codebooks"], device=index.codes.device)
        index.codes[seat, layer, :, job.begin : job.end] = torch.tensor(
            segment.arrays["codes"], device=index.codes.device
        )

    def extend(self, index: PQIndex, seat: int, layers: range, begin: int, keys: Tensor) -> None:
        span = slice(layers.start, layers.stop)
        codes = pq_assign(keys, index.codebooks[seat, span])
        index.codes[seat, span, :, begin : begin + keys.shape[2]] = codes

    def score(self, index: PQIndex, candidates: Candidates) -> Tensor:
        codes = index.codes[candidates.seats, candidates.layer, :, : candidates.num_positions]
        codebooks = index.codebooks[candidates.seats, candidates.layer]
        return pq_score(
            candidates.query, codebooks, codes, candidates.begin, candidates.end, candidates.scale
        )
