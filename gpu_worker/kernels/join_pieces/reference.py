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


def join_past(log_sums: Tensor, outputs: Tensor, own_sums: Tensor, own: Tensor) -> Tensor:
    """Attention of T queries over all before them and themselves, from attention over pieces of what is before them,
    where a group's heads are more queries of a KV head, and over themselves.

    log_sums, own_sums: float32 [P, H_kv, G * T] and [H_q, T], the logarithm of each softmax sum, finite. outputs, own:
    [P, G * T, H_kv, d] and [T, H_q, d] in one dtype, each normalised by its own sum. Returns [T, H_q, d] in that dtype,
    summed in float32 and rounded once.
    """
    num_tokens = own.shape[0]
    by_head = outputs.unflatten(1, (-1, num_tokens)).permute(0, 3, 1, 2, 4).flatten(1, 2)
    every = torch.cat((log_sums.unflatten(2, (-1, num_tokens)).flatten(1, 2), own_sums[None]))
    return join_pieces(every, *by_head.transpose(1, 2), own)
