"""The definition of coding what leaves the window, in float32 PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.policies.pqcache.pq_score.reference import pq_assign


def pq_append(
    keys: Tensor,
    codebooks: Tensor,
    codes: Tensor,
    pair_counts: Tensor | None,
    seats: Tensor,
    positions: Tensor,
) -> None:
    """Write the codes of one token a lane, and count its pair of codes, in every layer and KV head, in place.

    A code is the nearest centroid's by L2; ties take the smallest.
    keys: [B, L, H_kv, d]. codebooks: float32 [seats, L, H_kv, m, ksub, d/m]. codes: uint8 [seats, L, H_kv, N, m], by
    position. pair_counts: int32 [seats, L, H_kv, ksub * ksub], at c * ksub + e for the codes (c, e); None: not
    counted. seats: int64 [B], all different. positions: int64 [B]; -1: the lane has no token.
    Raises ValueError if pairs are to be counted and m is not 2.
    """
    check_parts(codebooks, pair_counts)
    present = (positions >= 0).nonzero()[:, 0]
    seats, positions = seats[present], positions[present]
    books = codebooks[seats]
    found = pq_assign(keys[present].unsqueeze(-2), books).squeeze(-2)
    codes[seats, :, :, positions] = found
    if pair_counts is not None:
        pairs = found[..., :1].long() * codebooks.shape[-2] + found[..., 1:]
        counts = pair_counts[seats]
        pair_counts[seats] = counts.scatter_add_(-1, pairs, torch.ones_like(pairs, dtype=torch.int32))


def check_parts(codebooks: Tensor, pair_counts: Tensor | None) -> None:
    """Raise ValueError where there are no pairs to be counted."""
    if pair_counts is not None and codebooks.shape[3] != 2:
        raise ValueError(f"pq_append: codes of {codebooks.shape[3]} parts are no pairs to be counted")
