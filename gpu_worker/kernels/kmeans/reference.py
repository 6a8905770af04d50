"""What assigning and summing mean, in float32 PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

# Scores of points against centroids that exist at one time.
MAX_SCORES = 1 << 28


def assign_points(points: Tensor, centroids: Tensor, less: Tensor) -> Tensor:
    """The centroid with the largest inner product less its own number: int64 [P, n]. Ties take the smallest.

    points: [P, n, d]. centroids: float32 [P, C, d]. less: float32 [P, C]; infinity for a centroid that no point may
    have, if each problem has one that may be.
    """
    num_problems, num_points, _ = points.shape
    chunk = max(1, MAX_SCORES // max(1, num_problems * centroids.shape[1]))
    labels = [points.new_empty(num_problems, 0, dtype=torch.int64)]
    for begin in range(0, num_points, chunk):
        scores = points[:, begin : begin + chunk].float() @ centroids.mT
        labels.append((scores - less[:, None]).argmax(dim=-1))
    return torch.cat(labels, dim=1)


def sum_members(points: Tensor, order: Tensor, sizes: Tensor) -> Tensor:
    """Sum of each cluster's points, in their order: float32 [P, C, d], zeros for an empty cluster.

    points: [P, n, d]. order: int64 [P, n], places of the points, those of cluster 0 first, then of 1, ... sizes: int64
    [P, C], how many each has; n in all.
    """
    num_problems, num_clusters = sizes.shape
    width = points.shape[2]
    ordered = points.float().gather(1, order[..., None].expand(-1, -1, width))
    sums = torch.segment_reduce(ordered.flatten(0, 1), "sum", lengths=sizes.flatten(), unsafe=True, initial=0)
    return sums.view(num_problems, num_clusters, width)
