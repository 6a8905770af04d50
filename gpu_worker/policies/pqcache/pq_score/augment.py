"""Keys by inner product for trainers and coders that know L2 (PQCache's `ip` variant, PQ-A4)."""

from __future__ import annotations

import torch
from torch import Tensor


def max_square_norms(keys: Tensor, num_parts: int) -> Tensor:
    """phi: the largest |x|^2 among the parts x of keys [..., T, d], float32 [..., m]."""
    return keys.float().unflatten(-1, (num_parts, -1)).square().sum(-1).amax(dim=-2)


def augment(keys: Tensor, max_square_norms: Tensor) -> Tensor:
    """Keys with one more coordinate behind each part x, sqrt(phi - |x|^2): float32 [..., m * (d/m + 1)].

    keys: [..., d]. max_square_norms: phi, float32 [..., m], of the keys that were fitted; a longer part than all of
    theirs gets 0. All others are of length sqrt(phi) then, so that the nearest by L2 to a query, whose own coordinate
    is 0, is the one of the largest inner product.
    """
    parts = keys.float().unflatten(-1, (max_square_norms.shape[-1], -1))
    room = (max_square_norms - parts.square().sum(-1)).clamp(min=0)
    return torch.cat([parts, room.sqrt()[..., None]], dim=-1).flatten(-2)
