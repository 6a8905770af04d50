"""PQCache: keys product-quantised at prefill; approximate inner products choose the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, cast

import torch
from torch import Tensor

from gpu_worker.kernels.kmeans import lloyd
from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.hyper_parameters import Between, Iterations, OneOf, SplitShare, SplitTokens
from gpu_worker.policies.pqcache.pq_append import pq_append
from gpu_worker.policies.pqcache.pq_score import augment, max_square_norms, pq_assign, pq_score
from gpu_worker.policies.pqcache.pq_select import pq_select
from gpu_worker.policies.recall import Candidates, IndexJob, Leaving, ReadKeys, RecallPolicy, TrainedSegment
from kv_store.client import PQ_METRICS, PQParams

# More points a centroid change the codebook little, and a prompt waits for it: FAISS asks for 39 at least.
POINTS_PER_CENTROID = 64
MANY_POINTS = 1 << 20

NORMALIZED_OVER = ("candidates", "all")

# Tokens whose keys are read, and coded, at a time.
CODED = 1 << 15
# 4^7 pairs of codes are a table of 64 KiB in float32.
MAX_PAIR_BITS = 7
# A head's codes begin where vectors of them do, whatever the longest sequence is: else they are read one by one.
ALIGNED = 16
# Of a key while its pair of codes is counted: int64 copies of the pair, and a one.
PAIR_BYTES = 24


@dataclass(frozen=True, slots=True)
class PQIndex:
    """codebooks: float32 [seats, L, H_kv, m, 2^b, d/m]. codes: uint8 [seats, L, H_kv, N, m], N the multiple of
    `ALIGNED` from max_model_len on. pair_counts: int32 [seats, L, H_kv, 4^b], how many candidates have each pair of
    codes; None unless m is 2 and pairs are few. By inner product, else None: coders float32 [seats, L, H_kv, m, 2^b,
    d/m + 1], the codebooks that keys are coded by, and max_square_norms float32 [seats, L, H_kv, m], to `augment`
    them with."""

    codebooks: Tensor
    codes: Tensor
    pair_counts: Tensor | None
    coders: Tensor | None
    max_square_norms: Tensor | None


@dataclass(frozen=True, slots=True)
class PQCache(RecallPolicy[PQIndex]):
    """All tokens; the top k by product-quantised keys (Zhang et al., PQCache, sections 3.1 to 3.3).

    num_subvectors: partitions m of a key. num_bits: b, 2^b centroids a partition. num_sink: first tokens, always
    attended. recent_ratio: the window's share of all other attended tokens. max_iterations: of K-means; 0 lets the
    store bound them by the paper's adaptive rule, and a trainer on the device choose.
    points_per_centroid: most that a trainer on the device fits, spread evenly; the paper fits all. metric: of K-means
    and codes, "l2" or "ip", L2 of keys augmented for inner products (PQ-A4); scores are inner products by both.
    normalize: a query head's weights sum to 1 over the "candidates", as in the paper, or over "all" that it attends,
    sinks, window and new token included, so that a head of which these have most has less to say; every candidate then
    gets a score. names_metric: the policy is called by its metric too, `pqcache+ip`, to be served along with another's.
    """

    num_subvectors: Annotated[int, Between(1, 64)] = 2
    num_bits: Annotated[int, Between(1, 8)] = 6
    num_sink: SplitTokens = 32
    recent_ratio: SplitShare = 0.5
    max_iterations: Iterations = 0
    points_per_centroid: Annotated[int, Between(1, MANY_POINTS)] = POINTS_PER_CENTROID
    metric: Annotated[str, OneOf(PQ_METRICS)] = "l2"
    normalize: Annotated[str, OneOf(NORMALIZED_OVER)] = "candidates"
    names_metric: bool = False

    needs_index_here = False

    @property
    def name(self) -> str:
        return "pqcache" + f"+{self.metric}" * self.names_metric

    def split(self, plan: Plan) -> Plan:
        plan = plan.split_by_ratio(self.num_sink, self.recent_ratio)
        num_candidates = plan.num_prompt_tokens - plan.num_sink - plan.num_recent
        return plan if num_candidates >= 2**self.num_bits else plan.attending_all()

    def allocate(self, shape: CacheShape) -> PQIndex:
        ksub, dsub, is_ip = 2**self.num_bits, shape.head_dim // self.num_subvectors, self.metric == "ip"
        counts = shape.seated(ksub * ksub, dtype=torch.int32) if self._counts_pairs else None
        num_positions = -(-shape.max_model_len // ALIGNED) * ALIGNED
        return PQIndex(
            codebooks=shape.seated(self.num_subvectors, ksub, dsub, dtype=torch.float32),
            codes=shape.seated(num_positions, self.num_subvectors, dtype=torch.uint8, tokens_each=1),
            pair_counts=counts,
            coders=shape.seated(self.num_subvectors, ksub, dsub + 1, dtype=torch.float32) if is_ip else None,
            max_square_norms=shape.seated(self.num_subvectors, dtype=torch.float32) if is_ip else None,
        )

    @property
    def _counts_pairs(self) -> bool:
        """Return whether a token's weight, which two codes determine, is looked up in a table of all their pairs."""
        return self.num_subvectors == 2 and self.num_bits <= MAX_PAIR_BITS

    def prompt_job(self, plan: Plan, begin: int, end: int) -> IndexJob:
        params = PQParams(self.num_subvectors, self.num_bits, self.max_iterations, self.metric)
        # By inner product keys are coded with a norm that takes a look at all of them, and training copies them all.
        if self.metric != "l2":
            return IndexJob(begin, end, params)
        coarse = replace(params, codebooks_only=True)
        # A given number of iterations is left to the store.
        is_free = self.max_iterations == 0
        return IndexJob(begin, end, params, coarse=coarse, is_quick=is_free, is_bounded=is_free)

    def train(self, keys: Tensor, job: IndexJob, seed: int) -> Mapping[str, Tensor]:
        return train_pq(keys, cast(PQParams, job.params), seed, self.points_per_centroid)

    def training_bytes(self, keys: Tensor, job: IndexJob) -> int:
        return pq_bytes(keys, cast(PQParams, job.params), self.points_per_centroid)

    def load(self, index: PQIndex, trained: TrainedSegment) -> None:
        seat, layer, job, arrays = trained.seat, trained.layer, trained.job, trained.arrays
        codebooks = arrays["codebooks"]
        codes = arrays["codes"] if trained.read_keys is None else _coded(codebooks, job, trained.read_keys)
        # A query's added coordinate is 0: tables need none.
        index.codebooks[seat, layer] = codebooks[..., : index.codebooks.shape[-1]]
        if index.coders is not None and index.max_square_norms is not None:
            index.coders[seat, layer] = codebooks
            index.max_square_norms[seat, layer] = arrays["max_square_norms"]
        index.codes[seat, layer, :, job.begin : job.end] = codes
        if index.pair_counts is not None:
            pairs = codes[..., 0].long() * 2**self.num_bits + codes[..., 1]
            counts = index.pair_counts[seat, layer]
            counts.zero_()
            counts.scatter_add_(1, pairs, torch.ones_like(pairs, dtype=torch.int32))

    def load_bytes(self, num_keys: int) -> int:
        return num_keys * (self.num_subvectors + (PAIR_BYTES if self._counts_pairs else 0))

    def extend(self, index: PQIndex, leaving: Leaving) -> None:
        seats, keys = leaving.seats, leaving.read_keys()
        counts = None if index.pair_counts is None else leaving.at_layers(index.pair_counts)
        coders = index.codebooks if index.coders is None else index.coders
        if index.max_square_norms is not None:
            keys = augment(keys, leaving.at_layers(index.max_square_norms)[seats])
        codebooks, codes = leaving.at_layers(coders), leaving.at_layers(index.codes)
        pq_append(keys, codebooks, codes, counts, seats, leaving.positions)

    def select(self, index: PQIndex, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        if index.pair_counts is None or self.normalize == "all":
            return super(PQCache, self).select(index, candidates, counts, width)
        layer = candidates.layer
        return pq_select(
            candidates.query,
            index.codebooks[:, layer],
            index.codes[:, layer],
            index.pair_counts[:, layer],
            candidates.seats,
            candidates.begin,
            candidates.end,
            counts,
            width,
            candidates.num_positions,
            candidates.scale,
        )

    def score(self, index: PQIndex, candidates: Candidates) -> Tensor:
        return pq_score(
            candidates.query,
            index.codebooks[:, candidates.layer],
            index.codes[:, candidates.layer],
            candidates.seats,
            candidates.begin,
            candidates.end,
            candidates.scale,
            candidates.num_positions,
            None if self.normalize == "candidates" else _log_sums(candidates),
        )


def _log_sums(candidates: Candidates) -> Tensor:
    """Return exact log-sum-exps over sinks, window and new token: float32 [B, H_q]."""
    keys, is_there = candidates.fixed_keys()
    query = candidates.query.float()
    grouped = query.view(*keys.shape[:2], -1, keys.shape[3])
    scores = grouped @ keys.float().transpose(-1, -2) * candidates.scale
    return scores.masked_fill(~is_there[:, :, None], float("-inf")).logsumexp(dim=-1).view(query.shape[:2])


def _coded(codebooks: Tensor, job: IndexJob, read_keys: ReadKeys) -> Tensor:
    """Codes of a job's tokens: uint8 [H_kv, end - begin, m]."""
    begins = range(job.begin, job.end, CODED)
    spans = [pq_assign(read_keys(begin, min(begin + CODED, job.end)), codebooks) for begin in begins]
    return torch.cat(spans, dim=1)


def pq_bytes(keys: Tensor, params: PQParams, points_per_centroid: int = POINTS_PER_CENTROID) -> int:
    """See `RecallPolicy.training_bytes`. By L2 keys are read where they lie; by inner product they become float32 with
    a coordinate more in each part, from a float32 copy and its squares."""
    num_heads, num_tokens, head_dim = keys.shape
    num_parts, ksub = params.num_subvectors, 1 << params.num_bits
    copied = 0
    if params.metric == "ip":
        copied = 2 * 4 * num_heads * num_tokens * (head_dim + 2 * num_parts)
        keys = keys.new_empty(num_heads, num_tokens, head_dim + num_parts, dtype=torch.float32)
    sample = keys[:, : points_per_centroid * ksub]
    parts = sample.unflatten(-1, (num_parts, -1)).transpose(1, 2).flatten(0, 1)
    codes = num_heads * num_tokens * num_parts
    return copied + 2 * sample.nbytes + lloyd.fit_bytes(parts, ksub) + codes


def train_pq(
    keys: Tensor, params: PQParams, seed: int, points_per_centroid: int = POINTS_PER_CENTROID
) -> Mapping[str, Tensor]:
    """See `RecallPolicy.train`: codebooks float32 [H, m, 2^b, d/m] and codes uint8 [H, T, m], by inner product a
    coordinate more in every centroid and max_square_norms float32 [H, m]. With no more tokens than centroids each token
    is its own."""
    iterations = params.max_iterations or lloyd.DEFAULT_ITERATIONS
    num_parts, ksub = params.num_subvectors, 1 << params.num_bits
    extra = {}
    if params.metric == "ip":
        extra["max_square_norms"] = max_square_norms(keys, num_parts)
        keys = augment(keys, extra["max_square_norms"][:, None])
    num_heads, num_tokens, head_dim = keys.shape
    num_points = min(num_tokens, points_per_centroid * ksub)
    places = lloyd.spread(num_tokens, num_points, seed, keys.device)
    sample = keys[:, places] if num_points < num_tokens else keys
    parts = sample.unflatten(-1, (num_parts, head_dim // num_parts)).transpose(1, 2).flatten(0, 1)
    if num_tokens <= ksub:
        filled = torch.arange(ksub, device=keys.device).clamp(max=num_tokens - 1)
        codebooks = parts[:, filled].float().view(num_heads, num_parts, ksub, -1)
        # By its number: rounding would not tell nearly equal tokens apart.
        own = torch.arange(num_tokens, device=keys.device, dtype=torch.uint8)[:, None]
        codes = own.expand(num_heads, -1, num_parts).contiguous()
    else:
        fitted, _ = lloyd.fit(parts, ksub, iterations, seed, metric="l2")
        codebooks = fitted.means.view(num_heads, num_parts, ksub, -1)
        codes = pq_assign(keys, codebooks)
    return {"codebooks": codebooks, "codes": codes, **extra}
