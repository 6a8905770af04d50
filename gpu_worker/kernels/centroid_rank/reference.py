"""The definition of whole-cluster selection (ClusterKV section III-C), in float32 PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.pq_score.reference import outside


def centroid_rank(
    query: Tensor,
    centroids: Tensor,
    sizes: Tensor,
    labels: Tensor,
    within: Tensor,
    begin: Tensor,
    end: Tensor,
) -> Tensor:
    """Minus the place of each token when clusters are taken whole, best inner product first.

    The top k of the result are the clusters of the largest query-centroid products, the last one trimmed at its
    highest positions (CK-A3). Products are summed over the GQA group (CK-A2); ties take the smaller cluster id.
    query: [B, H_q, d]. centroids: float32 [B, H_kv, C, d]. sizes: int32 [B, H_kv, C], 0 for an unused one.
    labels, within: int32 [B, H_kv, N], cluster of a position and its place in it by ascending position.
    begin, end: int64 [B]. Returns float32 [B, H_kv, N]; -inf beyond the candidates. Exact for N <= 2^24.
    """
    batch, num_kv_heads, _num_clusters, head_dim = centroids.shape
    group_sum = query.float().view(batch, num_kv_heads, -1, head_dim).sum(dim=2)
    products = torch.einsum("bhd,bhcd->bhc", group_sum, centroids).masked_fill(sizes == 0, float("-inf"))
    order = products.argsort(dim=-1, descending=True, stable=True)
    ordered_sizes = sizes.long().gather(-1, order)
    starts = torch.empty_like(ordered_sizes)
    starts.scatter_(-1, order, ordered_sizes.cumsum(-1) - ordered_sizes)
    masked = outside(labels.shape[-1], begin, end)
    # What is no candidate may hold any label.
    places = starts.gather(-1, labels.masked_fill(masked[:, None], 0).long()) + within
    return places.neg().float().masked_fill(masked[:, None], float("-inf"))
