"""The definition of whole-cluster selection (ClusterKV section III-C), in float32 PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.top_k.reference import outside


def centroid_rank(
    query: Tensor,
    centroids: Tensor,
    sizes: Tensor,
    labels: Tensor,
    within: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    num_positions: int,
) -> Tensor:
    """Minus the place of each token when clusters are taken whole, best inner product first.

    The top k of the result are the clusters of the largest query-centroid products, the last one trimmed at its
    highest positions (CK-A3). Products are summed over the GQA group (CK-A2); ties take the smaller cluster id.
    query: [B, H_q, d]. centroids: float32 [seats, H_kv, C, d]. sizes: int32 [seats, H_kv, C], 0 for an unused one.
    labels, within: int32 [seats, H_kv, N], cluster of a position and its place in it by ascending position.
    seats: int64 [B], the seat of each row. begin, end: int64 [B]. num_positions: at most N.
    Returns float32 [B, H_kv, num_positions]; -inf beyond the candidates. Exact for N <= 2^24.
    """
    centroids, sizes = centroids[seats], sizes[seats]
    batch, num_kv_heads, _num_clusters, head_dim = centroids.shape
    group_sum = query.float().view(batch, num_kv_heads, -1, head_dim).sum(dim=2)
    products = torch.einsum("bhd,bhcd->bhc", group_sum, centroids).masked_fill(sizes == 0, float("-inf"))
    order = products.argsort(dim=-1, descending=True, stable=True)
    ordered_sizes = sizes.long().gather(-1, order)
    starts = torch.empty_like(ordered_sizes)
    starts.scatter_(-1, order, ordered_sizes.cumsum(-1) - ordered_sizes)
    masked = outside(num_positions, begin, end)[:, None]
    # What is no candidate may hold any label.
    labels = labels[seats, :, :num_positions].masked_fill(masked, 0)
    places = starts.gather(-1, labels.long()) + within[seats, :, :num_positions]
    return places.neg().float().masked_fill(masked, float("-inf"))
