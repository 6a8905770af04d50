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
) -> Tensor:
    """Softmax over candidates of the approximate inner products, summed over each GQA group.

    query: [B, H_q, d]. codebooks: float32 [seats, H_kv, m, ksub, d/m]. codes: uint8 [seats, H_kv, N, m], by position.
    seats: int64 [B], the seat of each row. begin, end: int64 [B], the candidates' positions. num_positions: at most N.
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
    weights = (scores * scale).masked_fill(masked[:, None, None], float("-inf")).softmax(dim=-1)
    return weights.sum(dim=2).masked_fill(masked[:, None], float("-inf"))


def pq_assign(keys: Tensor, codebooks: Tensor) -> Tensor:
    """Code of each key: the nearest centroid by L2 in every sub-space; ties take the smallest code.

    keys: [..., T, d]. codebooks: float32 [..., m, ksub, d/m]. Returns uint8 [..., T, m].
    """
    num_subvectors, dsub = codebooks.shape[-3], codebooks.shape[-1]
    parts = keys.float().unflatten(-1, (num_subvectors, dsub)).transpose(-2, -3)
    distances = codebooks.square().sum(-1)[..., None, :] - 2 * parts @ codebooks.transpose(-1, -2)
    return distances.argmin(dim=-1).transpose(-1, -2).to(torch.uint8)
