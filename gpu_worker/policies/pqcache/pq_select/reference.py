"""The definition of selection by pairs of codes, in float32 PyTorch.

Where a key has two codes, its weight is a function of the pair: the softmax needs one exponential for every pair that
occurs, weighted by how many candidates have it, and none for a candidate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_worker.kernels.top_k.reference import outside

LOG2_E = math.log2(math.e)
MAX_KSUB = 128


def pq_select(
    query: Tensor,
    codebooks: Tensor,
    codes: Tensor,
    pair_counts: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    counts: Tensor,
    width: int,
    num_positions: int,
    scale: float,
) -> Tensor:
    """Positions of the best `counts[b]` candidates of every head, ascending; -1 pads at the end.

    The best by `pq_score`, up to rounding; a tie, such as of the same two codes, goes to the higher position.
    query: [B, H_q, d]. codebooks: float32 [seats, H_kv, 2, ksub, d/2]. codes: uint8 [seats, H_kv, N, 2], by position.
    pair_counts: int32 [seats, H_kv, ksub * ksub], how many candidates have the codes (c, e) at c * ksub + e.
    seats: int64 [B], the seat of each row. begin, end: int64 [B], the candidates' positions. counts: int64 [B], none
    above `width`. num_positions: at most N, and no end is above it. Returns int64 [B, H_kv, width].
    Raises ValueError for another number of parts than 2 and for more than 128 centroids.
    """
    check_pairs(codebooks)
    batch, num_kv_heads = query.shape[0], codes.shape[1]
    taken = torch.full((batch, num_kv_heads, width), -1, device=query.device)
    if taken.numel() * num_positions == 0:
        return taken
    occurring = pair_counts[seats]
    weights = _pair_weights(query, codebooks[seats], occurring, scale)
    asked = counts.minimum(end - begin).clamp(0, width)[:, None, None]
    threshold = _threshold(weights, occurring, asked, width)
    # -1: no candidate. Such may hold any byte, also one that is no code.
    masked = outside(num_positions, begin, end)[:, None]
    pairs = codes[seats, :, :num_positions].long()
    pairs = (pairs[..., 0] * codebooks.shape[-2] + pairs[..., 1]).masked_fill_(masked, 0)
    scores = weights.gather(-1, pairs).masked_fill_(masked | (asked == 0), -1)
    tied = scores == threshold
    eligible = scores >= threshold
    too_low = eligible.sum(dim=-1, keepdim=True) - asked
    eligible &= ~tied | (tied.cumsum(dim=-1, dtype=torch.int32) > too_low)
    row, head, position = eligible.nonzero(as_tuple=True)
    found = eligible.sum(dim=-1).view(-1)
    rank = (
        torch.arange(row.shape[0], device=row.device) - (found.cumsum(0) - found)[row * num_kv_heads + head]
    )
    taken[row, head, rank] = position
    return taken


def check_pairs(codebooks: Tensor) -> None:
    """Raise ValueError where there is no table of pairs of codes, or too large a one."""
    num_parts, ksub = codebooks.shape[2:4]
    if num_parts != 2:
        raise ValueError(f"pq_select: keys have {num_parts} parts, not 2")
    if ksub > MAX_KSUB:
        raise ValueError(f"pq_select: {ksub} centroids a part are more than {MAX_KSUB}")


def _pair_weights(query: Tensor, codebooks: Tensor, pair_counts: Tensor, scale: float) -> Tensor:
    """Softmax over the candidates, summed over each GQA group: [B, H_kv, ksub * ksub], by pair of codes.

    -1 where the pair does not occur.
    """
    batch, num_kv_heads, _, _, dsub = codebooks.shape
    parts = query.float().view(batch, num_kv_heads, -1, 2, dsub) * (scale * LOG2_E)
    table = torch.einsum("bhgmd,bhmkd->bhgmk", parts, codebooks)
    scores = (table[:, :, :, 0, :, None] + table[:, :, :, 1, None, :]).flatten(-2)
    is_absent = pair_counts == 0
    scores.masked_fill_(is_absent[:, :, None], -math.inf)
    exponentials = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp2_()
    totals = exponentials @ pair_counts.float()[..., None]
    weights = (totals.reciprocal().transpose(-1, -2) @ exponentials).squeeze(-2)
    return weights.masked_fill_(is_absent, -1)


def _threshold(weights: Tensor, pair_counts: Tensor, asked: Tensor, width: int) -> Tensor:
    """The weight of the asked-th best candidate: [B, H_kv, 1]."""
    # Every pair that occurs has a candidate at least, so that this many of the best hold it.
    best = weights.topk(min(width, weights.shape[-1]), dim=-1)
    reached = pair_counts.clamp(min=0).gather(-1, best.indices).cumsum(dim=-1)
    last = (reached < asked).sum(dim=-1, keepdim=True).clamp(max=reached.shape[-1] - 1)
    return best.values.gather(-1, last)
