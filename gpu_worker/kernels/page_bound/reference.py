"""The definition of Quest's page score, in float32 PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.pq_score.reference import outside


def page_bound(query: Tensor, key_min: Tensor, key_max: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Upper bound of the inner products with a page's keys, channel by channel, summed over each GQA group.

    query: [B, H_q, d]. key_min, key_max: [B, H_kv, num_pages, d], the least and largest value that a channel takes in
    a page. begin, end: int64 [B]; candidates are the pages [begin, end). Returns float32 [B, H_kv, num_pages]; -inf
    beyond the candidates.
    """
    batch, num_kv_heads, num_pages, head_dim = key_min.shape
    grouped = query.float().view(batch, num_kv_heads, -1, 1, head_dim)
    bounds = torch.maximum(grouped * key_min.float()[:, :, None], grouped * key_max.float()[:, :, None])
    # [B, H_kv, G, num_pages, d]
    masked = outside(num_pages, begin, end)
    return bounds.sum(dim=(2, 4)).masked_fill(masked[:, None], float("-inf"))
