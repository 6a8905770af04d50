"""The definition of Quest's page score, in float32 PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.top_k.reference import outside


def page_bound(
    query: Tensor,
    key_min: Tensor,
    key_max: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    num_pages: int,
) -> Tensor:
    """Upper bound of the inner products with a page's keys, channel by channel, summed over each GQA group.

    query: [B, H_q, d]. key_min, key_max: [seats, H_kv, P, d], the least and largest value that a channel takes in a
    page. seats: int64 [B], the seat of each row. begin, end: int64 [B]; candidates are the pages [begin, end).
    num_pages: at most P, and no end is above it. Returns float32 [B, H_kv, num_pages]; -inf beyond the candidates.
    """
    _, num_kv_heads, _, head_dim = key_min.shape
    least, largest = (extremes[seats, :, None, :num_pages].float() for extremes in (key_min, key_max))
    grouped = query.float().view(query.shape[0], num_kv_heads, -1, 1, head_dim)
    bounds = torch.maximum(grouped * least, grouped * largest)
    # [B, H_kv, G, num_pages, d]
    masked = outside(num_pages, begin, end)
    return bounds.sum(dim=(2, 4)).masked_fill(masked[:, None], float("-inf"))
