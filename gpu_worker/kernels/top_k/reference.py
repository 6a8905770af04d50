"""The definition of selection by score, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(scores: Tensor, counts: Tensor) -> Tensor:
    """Positions of the best `counts[b]` scores of every head, ascending; -1 pads at the end.

    A tie goes to the higher position (the more recent token). -inf marks what is no candidate and is never taken.
    scores: float32 [B, H, N]. counts: int64 [B]. Returns int64 [B, H, max(counts)].
    """
    num_positions = scores.shape[-1]
    width = int(counts.max()) if counts.numel() else 0
    # Stable on reversed positions: among equals the highest position comes first.
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :width]
    positions = num_positions - 1 - order
    taken = torch.arange(positions.shape[-1], device=scores.device) < counts[:, None, None]
    taken = taken & (scores.gather(-1, positions) > float("-inf"))
    positions = positions.masked_fill(~taken, num_positions).sort(dim=-1).values
    if positions.shape[-1] < width:
        pad = positions.new_full((*positions.shape[:-1], width - positions.shape[-1]), num_positions)
        positions = torch.cat([positions, pad], dim=-1)
    return positions.masked_fill(positions == num_positions, -1)
