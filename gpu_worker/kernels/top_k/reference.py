"""The definition of selection by score, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(scores: Tensor, counts: Tensor, width: int | None = None) -> Tensor:
    """Positions of the best `counts[b]` scores of every head, ascending; -1 pads at the end.

    A tie goes to the higher position (the more recent token). -inf marks what is no candidate and is never taken.
    scores: float32 [B, H, N]. counts: int64 [B]. width: max(counts), known to the caller; to read it here would
    synchronise with the host. Returns int64 [B, H, width].
    """
    batch, num_heads, num_positions = scores.shape
    if width is None:
        width = int(counts.max()) if counts.numel() else 0
    reach = min(width, num_positions)
    if reach == 0:
        return torch.full((batch, num_heads, width), -1, device=scores.device)
    best = scores.topk(reach, dim=-1).values
    last = (counts.clamp(max=reach) - 1).clamp(min=0)[:, None, None].expand(-1, num_heads, 1)
    threshold = best.gather(-1, last)
    above = scores > threshold
    # Of the equals, the highest positions fill what is left.
    equal = (scores == threshold) & (scores > float("-inf"))
    left = counts[:, None, None] - above.sum(dim=-1, keepdim=True)
    taken = above | (equal & (equal.flip(-1).cumsum(-1).flip(-1) <= left))
    positions = torch.arange(num_positions, device=scores.device).where(taken, num_positions)
    positions = positions.topk(reach, dim=-1, largest=False, sorted=True).values
    positions = torch.nn.functional.pad(positions, (0, width - reach), value=num_positions)
    return positions.masked_fill(positions == num_positions, -1)


def outside(num_positions: int, begin: Tensor, end: Tensor) -> Tensor:
    """Positions of each row that are not in [begin, end): bool [B, num_positions]. begin, end: int64 [B]."""
    positions = torch.arange(num_positions, device=begin.device)
    return (positions < begin[:, None]) | (positions >= end[:, None])
