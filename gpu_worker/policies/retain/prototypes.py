"""Prototypes: directions that stand for groups of keys, found in one pass, by place or by hash."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.kernels.kmeans import assign_points

EPS = 1e-6
# 256 MiB of float32.
MAX_ELEMENTS = 1 << 26
# Of a vote that becomes an integer: a sum of votes, at most the window's length, then stays below 2^62.
VOTE_BITS = 48


@dataclass(frozen=True, slots=True)
class RandomFeatures:
    """Signs of random Fourier features of a key's direction, read as a number (ProtoKV, equations 12 to 14).

    weights: float32 [H_kv, d, r]. phases: float32 [H_kv, 1, r]. num_buckets: u, and 2^r is at least that.
    """

    weights: Tensor
    phases: Tensor
    num_buckets: int

    @classmethod
    def draw(cls, keys: Tensor, num_buckets: int, gamma: float, seed: int) -> RandomFeatures:
        """Each head's own, for keys [H_kv, n, d]; gamma: standard deviation of the weights."""
        generator = torch.Generator().manual_seed(seed)
        num_heads, _, head_dim = keys.shape
        num_bits = (num_buckets - 1).bit_length()
        weights = gamma * torch.randn(num_heads, head_dim, num_bits, generator=generator)
        phases = 2 * torch.pi * torch.rand(num_heads, 1, num_bits, generator=generator)
        return cls(weights.to(keys.device), phases.to(keys.device), num_buckets)

    def buckets(self, keys: Tensor) -> Tensor:
        """int64 [H_kv, n] of float32 [H_kv, n, d]."""
        # Without their length (PK-A5). The factor of equation 12 changes no sign.
        is_positive = torch.cos(_units(keys) @ self.weights + self.phases) > 0
        num_bits = self.weights.shape[2]
        places = torch.arange(num_bits - 1, -1, -1, device=keys.device)
        return (is_positive.long() << places).sum(dim=-1) % self.num_buckets


def irregularity(keys: Tensor, num_chunks: int) -> Tensor:
    """How far a key turns away from its chunk's mean, in units of the chunk's spread: float32 [H, n] (equation 10)."""
    scores = []
    for chunks in _equal_chunks(keys, num_chunks):
        members = chunks.float()
        means = members.mean(dim=2, keepdim=True)
        # The norm of the channels' standard deviations.
        spread = (members - means).square().sum(dim=-1).mean(dim=-1, keepdim=True).sqrt()
        # 1 - cos as half a squared distance: a chunk of equal keys must not be irregular by a rounding error.
        turned = (_units(members) - _units(means)).square().sum(dim=-1) / 2
        scores.append((turned / spread.clamp(min=EPS)).flatten(1))
    return torch.cat(scores, dim=1)


def chunk_sums(keys: Tensor, num_chunks: int, is_member: Tensor | None = None) -> Tensor:
    """Sums of chunks of equal length, the last with the rest too: float32 [H, k, d] from [H, n, d]. is_member: bool
    [H, n]; None: all."""
    if is_member is None:
        is_member = torch.ones(1, 1, dtype=torch.bool, device=keys.device).expand(keys.shape[:2])
    is_member = is_member[..., None].expand_as(keys)
    pairs = zip(_equal_chunks(keys, num_chunks), _equal_chunks(is_member, num_chunks), strict=True)
    return torch.cat([(chunks.float() * members).sum(dim=2) for chunks, members in pairs], dim=1)


def bucket_sums(keys: Tensor, features: RandomFeatures) -> Tensor:
    """Sums of hash buckets: float32 [H, u, d] from [H, n, d]."""
    num_heads, _, head_dim = keys.shape
    every = torch.arange(features.num_buckets, device=keys.device)
    sums = torch.zeros(num_heads, features.num_buckets, head_dim, device=keys.device)
    for tile in keys.split(_tokens_a_tile(num_heads, features.num_buckets), dim=1):
        members = tile.float()
        # A product, not atomic additions, whose order would differ from run to run.
        is_in = features.buckets(members)[..., None] == every
        sums += is_in.float().transpose(1, 2) @ members
    return sums


def nearest_prototype(keys: Tensor, sums: Tensor) -> Tensor:
    """The prototype of highest cosine with each key: int64 [H, n] from [H, n, d] and groups' sums [H, m, d]. Ties take
    the first. Prototypes' directions are rounded to the keys' type."""
    # An empty group has no direction; its cosine of 0 must not win.
    less = torch.zeros_like(sums[..., 0]).masked_fill_(sums.norm(dim=-1) <= EPS, float("inf"))
    # A key's own length does not change its nearest.
    return assign_points(keys, _units(sums).to(keys.dtype), less).long()


def group_means(votes: Tensor, labels: Tensor, num_groups: int) -> Tensor:
    """Every token's vote becomes the mean of its group's: float32 [H, n]. votes: float32 [H, n], the sum of a head at
    most 2^14. labels: int64 [H, n]."""
    # Integers: their sum does not depend on the order, so that the same votes always give the same means.
    fixed = (votes * 2.0**VOTE_BITS).long()
    sums = torch.zeros(votes.shape[0], num_groups, dtype=torch.int64, device=votes.device)
    counts = torch.zeros_like(sums)
    sums.scatter_add_(1, labels, fixed)
    counts.scatter_add_(1, labels, torch.ones_like(labels))
    return (sums.float() / counts.clamp(min=1) * 2.0**-VOTE_BITS).gather(1, labels)


def _equal_chunks(rows: Tensor, num_chunks: int) -> Iterator[Tensor]:
    """Tiles [H, c, length, d] of [H, n, d], some chunks at a time; the last chunk, which takes the rest, alone."""
    num_heads, num_rows, width = rows.shape
    length = num_rows // num_chunks
    last = (num_chunks - 1) * length
    if last:
        step = max(1, MAX_ELEMENTS // (num_heads * length * width))
        yield from rows[:, :last].unflatten(1, (-1, length)).split(step, dim=1)
    yield rows[:, None, last:]


def _tokens_a_tile(num_heads: int, num_groups: int) -> int:
    return max(1, MAX_ELEMENTS // (num_heads * num_groups))


def _units(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=EPS)
