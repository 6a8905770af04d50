"""ProtoKV: the window's votes, averaged over groups of tokens around prototypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.kernels.kmeans import assign_points
from gpu_worker.kernels.top_k import top_k
from gpu_worker.policies.base import Plan
from gpu_worker.policies.hyper_parameters import Between, SomeTokens, Tokens
from gpu_worker.policies.observed import observed_weight
from gpu_worker.policies.protokv.chunks import chunk_sums, irregularity
from gpu_worker.policies.protokv.group_means import group_means
from gpu_worker.policies.protokv.group_means.reference import MAX_VOTES
from gpu_worker.policies.protokv.hash_buckets import RandomFeatures, bucket_sums
from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.scored import ScoredPolicy, Scores

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class ProtoKV(ScoredPolicy):
    """Groups of tokens that the prompt's last queries attend (ProtoKV, section 4).

    window: last tokens, always kept, whose queries vote (PK-A1). chunk_length: tokens of a chunk, from which follows
    the paper's number of chunks k. num_bits: r, for u = 2^r hash buckets. num_irregular: p, tokens that turn away most
    from their chunk's mean; they make the buckets, the others the chunks. gamma: of the random Fourier features.
    chunk_prototypes, hash_prototypes: False is the paper's ablation (section 5.5), in which every token is of the other
    kind and the prototypes are as many as before; its name says which kind is left.
    """

    window: Annotated[int, Between(1, MAX_VOTES)] = 8
    chunk_length: SomeTokens = 50
    num_bits: Annotated[int, Between(1, 10)] = 4
    num_irregular: Tokens = 48
    gamma: Annotated[float, Between(0, 1000)] = 1.0
    chunk_prototypes: bool = True
    hash_prototypes: bool = True

    @property
    def name(self) -> str:
        return "protokv" + "+chunks" * (not self.hash_prototypes) + "+hashes" * (not self.chunk_prototypes)

    def __post_init__(self) -> None:
        if not (self.chunk_prototypes or self.hash_prototypes):
            raise ValueError("chunk_prototypes and hash_prototypes are both False: leave at least one True")

    def split(self, plan: Plan) -> Plan:
        return plan.split_by_number(0, self.window)

    def num_queries(self, plan: Plan) -> int:
        return plan.num_recent if plan.selects else 0

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        votes = observed_weight(rows)
        # Only the prefix is grouped (PK-A2), per KV head (PK-A7).
        num_prefix = rows.keys.shape[1] - plan.num_recent
        keys = rows.keys[:, :num_prefix]
        sums = self._group_sums(keys, seed=(rows.seed * rows.num_layers + rows.layer) % 2**63)
        means = group_means(votes[:, :num_prefix], nearest_prototype(keys, sums), sums.shape[1])
        # A group's members are equal: their own votes decide among them (PK-A6).
        return Scores(F.pad(means, (0, plan.num_recent)), second=votes)

    def _group_sums(self, keys: Tensor, seed: int) -> Tensor:
        """Sums of what each prototype stands for: float32 [H_kv, k + u, d]."""
        num_tokens = keys.shape[1]
        num_chunks, num_buckets = max(1, num_tokens // self.chunk_length), 2**self.num_bits
        if not self.hash_prototypes:
            # By a shorter length: were it by number, the last chunk would take a rest of up to k + u tokens.
            length = max(1, num_tokens // (num_chunks + num_buckets))
            return chunk_sums(keys, num_tokens // length)
        if not self.chunk_prototypes:
            features = RandomFeatures.draw(keys, num_chunks + num_buckets, self.gamma, seed)
            return bucket_sums(keys, features)
        irregular = self._most_irregular(keys, num_chunks)
        is_regular = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
        is_regular.scatter_(1, irregular, False)
        outliers = keys.gather(1, irregular[..., None].expand(-1, -1, keys.shape[2]))
        features = RandomFeatures.draw(keys, num_buckets, self.gamma, seed)
        return torch.cat([chunk_sums(keys, num_chunks, is_regular), bucket_sums(outliers, features)], dim=1)

    def _most_irregular(self, keys: Tensor, num_chunks: int) -> Tensor:
        """Return the most irregular tokens of all chunks (PK-A3), ties to the later: int64 [H_kv, p], ascending."""
        width = min(self.num_irregular, keys.shape[1])
        counts = torch.full((1,), width, device=keys.device)
        # All are finite, so that none is missing.
        return top_k(irregularity(keys, num_chunks)[None], counts, width)[0]


def nearest_prototype(keys: Tensor, sums: Tensor) -> Tensor:
    """The prototype of highest cosine with each key: int32 [H, n] from [H, n, d] and groups' sums [H, m, d]. Ties take
    the first. Prototypes' directions are rounded to the keys' type."""
    lengths = sums.norm(dim=-1, keepdim=True)
    # An empty group has no direction; its cosine of 0 must not win.
    less = torch.where(lengths[..., 0] <= EPS, float("inf"), 0.0)
    # A key's own length does not change its nearest.
    return assign_points(keys, (sums / lengths.clamp(min=EPS)).to(keys.dtype), less)
