"""The definition of joined pieces of attention, in float32 PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def join_pieces(log_sums: Tensor, *outputs: Tensor) -> Tensor:
    """Attention over all tokens of the pieces of a context, from attention over each piece.

    log_sums: float32 [P, H, T], the logarithm of each piece's softmax sum, finite. outputs: P of [T, H, d] in one
    dtype, each normalised by its own sum. Returns [T, H, d] in that dtype, summed in float32 and rounded once.
    """
    shares = log_sums.softmax(dim=0).transpose(1, 2)[..., None]
    joined = torch.zeros(outputs[0].shape, device=log_sums.device)
    for share, output in zip(shares, outputs, strict=True):
        joined += share * output.float()
    return joined.to(outputs[0].dtype)
