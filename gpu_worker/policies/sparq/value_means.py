"""The mean of a sequence's values, which stands for what a step leaves out."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape


class ValueMeans:
    """For each seat, layer and KV head the sum of the values so far.

    sums: float32 [seats, L, H_kv, d]. counts: int64 [seats, L], tokens that are in them.
    """

    def __init__(self, shape: CacheShape) -> None:
        self._sums = shape.seated(shape.head_dim, dtype=torch.float32).zero_()
        self._counts = torch.zeros(
            shape.max_num_seqs, shape.num_layers, dtype=torch.int64, device=shape.device
        )

    def fill(self, seat: int, layer: int, values: Tensor) -> None:
        """Start a layer with its prompt's values [H_kv, n, d]."""
        self._sums[seat, layer] = values.sum(dim=1, dtype=torch.float32)
        self._counts[seat, layer] = values.shape[1]

    def take_in(self, seats: Tensor, layer: int, positions: Tensor, values: Tensor) -> Tensor:
        """Add the new tokens' values [B, H_kv, d] at positions int64 [B], -1 for padding. Returns the means over all
        tokens, float32 [B, H_kv, d]."""
        before, counts = self._sums[seats, layer], self._counts[seats, layer]
        # A step that is taken again adds nothing.
        is_new = positions == counts
        sums = torch.where(is_new[:, None, None], before + values.float(), before)
        self._sums[seats, layer] = sums
        self._counts[seats, layer] = counts + is_new
        return sums / (positions + 1).clamp(min=1)[:, None, None]


def mixed(attended: Tensor, means: Tensor, missed: Tensor) -> Tensor:
    """Attention [B, H_q, d] with means [B, H_kv, d] for the share of it that was missed, float32 [B, H_q]."""
    # [B, H_kv, group, ...]
    share = missed.unflatten(1, (means.shape[1], -1))[..., None]
    grouped = attended.unflatten(1, (means.shape[1], -1)).float()
    return torch.lerp(grouped, means[:, :, None].expand_as(grouped), share).flatten(1, 2).to(attended.dtype)
