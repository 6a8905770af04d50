"""The definition of residual addition and RMSNorm, in PyTorch."""

from __future__ import annotations

from torch import Tensor


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns hidden + added (or hidden itself) and its norm, both [T, W] in the type of `hidden`.

    The sum is rounded to that type before it is normed, as if it had been stored. hidden, added: [T, W], contiguous in
    W. weight: [W].
    """
    if added is not None:
        hidden = (hidden.float() + added.float()).to(hidden.dtype)
    wide = hidden.float()
    normed = wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.float()
    return hidden, normed.to(hidden.dtype)
