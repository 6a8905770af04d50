"""The definition of the best rows, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def best_rows(first: Tensor, counts: Tensor | None, width: int, second: Tensor | None = None) -> Tensor:
    """The `counts[h]` rows of every head that are best by `first`, ascending: int64 [H, width], -1 pads at the end.

    Ties go by `second`, then to the higher row; -0.0 and 0.0 tie. -inf or NaN in `first` is never taken, in `second` it
    is last. first, second: float32 [H, n]. counts: int64 [H], of which no more than `width` are taken;
    None: `width` of every head.
    """
    first = first.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    num_heads, num_rows = first.shape
    every = torch.arange(num_rows, device=first.device).expand(num_heads, -1)
    order = every.flip(1)
    if second is not None:
        second = second.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
        order = order.gather(1, second.gather(1, order).argsort(dim=1, descending=True, stable=True))
    order = order.gather(1, first.gather(1, order).argsort(dim=1, descending=True, stable=True))
    ranks = torch.empty_like(order).scatter_(1, order, every)
    most = width if counts is None else counts.clamp(max=width)[:, None]
    is_taken = (ranks < most) & (first > float("-inf"))
    taken = every.where(is_taken, num_rows).sort(dim=1).values[:, :width]
    taken = pad(taken, (0, width - taken.shape[1]), value=num_rows)
    return taken.masked_fill(taken == num_rows, -1)
