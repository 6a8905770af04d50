"""Prototypes: directions that stand for groups of keys, and the nearest of them."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.kmeans import assign_points

EPS = 1e-6


def nearest_prototype(keys: Tensor, sums: Tensor) -> Tensor:
    """The prototype of highest cosine with each key: int32 [H, n] from [H, n, d] and groups' sums [H, m, d]. Ties take
    the first. Prototypes' directions are rounded to the keys' type."""
    lengths = sums.norm(dim=-1, keepdim=True)
    # An empty group has no direction; its cosine of 0 must not win.
    less = torch.where(lengths[..., 0] <= EPS, float("inf"), 0.0)
    # A key's own length does not change its nearest.
    return assign_points(keys, (sums / lengths.clamp(min=EPS)).to(keys.dtype), less)
