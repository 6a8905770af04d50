"""The definition of residual addition and RMSNorm, in PyTorch; it is also what a CPU runs.

PyTorch adds, and norms, what has 16 bits in float32 and rounds the result.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    added: Tensor | None = None,
    added_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns hidden + added (or hidden itself) and its norm, both [T, W] in the type of `hidden`.

    hidden, added: [T, W] of one type, contiguous in W; only read. weight: [W], of that type or float32. added_weight:
    [W], of the norm that `added` goes through before it is added, or None. Each norm and the sum are computed in
    float32, and rounded as if they had been stored.
    """
    if added is not None:
        hidden = hidden + added if added_weight is None else add_normed(hidden, added, added_weight, eps)
    return hidden, _normed(hidden, weight, eps)


def add_normed(hidden: Tensor, added: Tensor, added_weight: Tensor, eps: float) -> Tensor:
    """The first result of `rms_norm` alone: hidden plus the norm of `added`, [T, W]."""
    return hidden + _normed(added, added_weight, eps)


def _normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    if rows.dtype == weight.dtype:
        return F.rms_norm(rows, weight.shape, weight, eps)
    return F.rms_norm(rows.to(weight.dtype), weight.shape, weight, eps).to(rows.dtype)
