"""Shares of a total in whole tokens, and measures in steps that errors of rounding do not reach."""

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


def rounded(values: Tensor, bits: int = 10) -> Tensor:
    """Float32 values cut to so many bits, rounded to nearest: what would be equal but for errors of rounding mostly is
    then, so that a rule for ties decides and not the device. Ten bits are a little finer than bfloat16."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2**bits).round(), exponent - bits)
