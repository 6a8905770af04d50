"""The definition of hashing by random features, in float32 PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.policies.protokv.chunks.reference import units

# 256 MiB of float32.
MAX_ELEMENTS = 1 << 26


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
        """Each head's own, for keys [H_kv, n, d], by their device's side without waiting for it; gamma: standard
        deviation of the weights. The same on every device."""
        generator = torch.Generator().manual_seed(seed)
        num_heads, _, head_dim = keys.shape
        num_bits = (num_buckets - 1).bit_length()
        weights = gamma * torch.randn(num_heads, head_dim, num_bits, generator=generator)
        phases = 2 * torch.pi * torch.rand(num_heads, 1, num_bits, generator=generator)
        if keys.device.type != "cpu":
            # One copy for both. PyTorch keeps the pinned memory until it is done.
            both = torch.cat([weights, phases], dim=1).pin_memory().to(keys.device, non_blocking=True)
            weights, phases = both[:, :head_dim], both[:, head_dim:]
        return cls(weights, phases, num_buckets)

    def buckets(self, keys: Tensor) -> Tensor:
        """int64 [H_kv, n] of float32 [H_kv, n, d]."""
        # Without their length (PK-A5). The factor of equation 12 changes no sign.
        is_positive = torch.cos(units(keys) @ self.weights + self.phases) > 0
        num_bits = self.weights.shape[2]
        places = torch.arange(num_bits - 1, -1, -1, device=keys.device)
        return (is_positive.long() << places).sum(dim=-1) % self.num_buckets


def bucket_sums(keys: Tensor, features: RandomFeatures) -> Tensor:
    """Sums of hash buckets: float32 [H, u, d] from [H, n, d]."""
    num_heads, _, head_dim = keys.shape
    every = torch.arange(features.num_buckets, device=keys.device)
    sums = torch.zeros(num_heads, features.num_buckets, head_dim, device=keys.device)
    for tile in keys.split(max(1, MAX_ELEMENTS // (num_heads * features.num_buckets)), dim=1):
        members = tile.float()
        # A product, not atomic additions, whose order would differ from run to run.
        is_in = features.buckets(members)[..., None] == every
        sums += is_in.float().transpose(1, 2) @ members
    return sums
