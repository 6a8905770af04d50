"""The definition of PQ scoring and code assignment (PQCache sections 3.1 and 3.3), in float32 PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.top_k.reference import outside


def pq_score(
    query: Tensor,
    codebooks: Tensor,
    codes: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    scale: float,
    num_positions: int,
    beside: Tensor | None = None,
) -> Tensor:
    """Softmax over candidates of the approximate inner products, summed over each GQA group.

    query: [B, H_q, d]. codebooks: float32 [seats, H_kv, m, ksub, d/m]. codes: uint8 [seats, H_kv, N, m], by position.
    seats: int64 [B], the seat of each row. begin, end: int64 [B], the candidates' positions. num_positions: at most N.
    beside: float32 [B, H_q], the logarithm of the sum of exponentials of what is attended beside the candidates, which
    then share each head's weight with it; None: they have all of it.
    Returns float32 [B, H_kv, num_positions]; -inf beyond the candidates.
    """
    # What is no candidate may hold any byte, also one that is no code.
    masked = outside(num_positions, begin, end)
    codes = codes[seats, :, :num_positions].masked_fill(masked[:, None, :, None], 0)
    codebooks = codebooks[seats]
    batch, num_kv_heads, num_subvectors, _, dsub = codebooks.shape
    parts = query.float().view(batch, num_kv_heads, -1, num_subvectors, dsub)
    table = torch.einsum("bhgmd,bhmkd->bhgmk", parts, codebooks)
    group = table.shape[2]
    scores = torch.zeros(batch, num_kv_heads, group, num_positions, device=query.device)
    for part in range(num_subvectors):
        index = codes[:, :, None, :, part].long().expand(-1, -1, group, -1)
        scores += table[:, :, :, part].gather(-1, index)
    scores = (scores * scale).masked_fill(masked[:, None, None], float("-inf"))
    weights = scores.softmax(dim=-1)
    if beside is not None:
        total = scores.logsumexp(dim=-1)
        weights *= torch.sigmoid(total - beside.view_as(total))[..., None]
    return weights.sum(dim=2).masked_fill(masked[:, None], float("-inf"))


def pq_assign(keys: Tensor, codebooks: Tensor) -> Tensor:
    """Code of each key: the nearest centroid by L2 in every sub-space; ties take the smallest code.

    keys: [..., T, d]. codebooks: float32 [..., m, ksub, d/m]. Returns uint8 [..., T, m].
    """
    num_subvectors, dsub = codebooks.shape[-3], codebooks.shape[-1]
    parts = keys.float().unflatten(-1, (num_subvectors, dsub)).transpose(-2, -3)
    distances = codebooks.square().sum(-1)[..., None, :] - 2 * parts @ codebooks.transpose(-1, -2)
    return distances.argmin(dim=-1).transpose(-1, -2).to(torch.uint8)


def max_square_norms(keys: Tensor, num_parts: int) -> Tensor:
    """phi: the largest |x|^2 among the parts x of keys [..., T, d], float32 [..., m]."""
    return keys.float().unflatten(-1, (num_parts, -1)).square().sum(-1).amax(dim=-2)


def augment(keys: Tensor, max_square_norms: Tensor) -> Tensor:
    """Keys with one more coordinate behind each part x, sqrt(phi - |x|^2): float32 [..., m * (d/m + 1)].

    keys: [..., d]. max_square_norms: phi, float32 [..., m], of the keys that were fitted; a longer part than all of
    theirs gets 0. All others are of length sqrt(phi) then, so that the nearest by L2 to a query, whose own coordinate
    is 0, is the one of the largest inner product.
    """
    parts = keys.float().unflatten(-1, (max_square_norms.shape[-1], -1))
    room = (max_square_norms - parts.square().sum(-1)).clamp(min=0)
    return torch.cat([parts, room.sqrt()[..., None]], dim=-1).flatten(-2)
