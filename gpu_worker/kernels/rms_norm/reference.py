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

    hidden, added: [T, W] of one type, contiguous in W; only read. weight: [W]. added_weight: [W], of the norm that
    `added` goes through before it is added, or None. Each norm and the sum are computed in float32, and rounded as if
    they had been stored.
    """
    if added is not None:
        hidden = hidden + added if added_weight is None else add_normed(hidden, added, added_weight, eps)
    return hidden, F.rms_norm(hidden, weight.shape, weight, eps)


def add_normed(hidden: Tensor, added: Tensor, added_weight: Tensor, eps: float) -> Tensor:
    """The first result of `rms_norm` alone: hidden plus the norm of `added`, [T, W]."""
    return hidden + F.rms_norm(added, added_weight.shape, added_weight, eps)
