"""Shares of a budget in whole tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def round_to_sum(shares: Tensor, total: int) -> Tensor:
    """Every share rounded down or up, so that the sum is `total`: int64 [k]. The largest remainders go up, of equal
    ones the first: what was in descending order still is.

    shares: float64 [k], none negative, of sum `total` up to rounding.
    """
    low = shares.floor()
    order = (low - shares).argsort(stable=True)
    goes_up = torch.arange(len(shares), device=shares.device) < total - low.sum()
    return low.long().scatter_add_(0, order, goes_up.long())
