"""Lloyd's K-means (1982) for many independent problems at once, without the host."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.kmeans import assign_points, sum_members

# Up to so many a matrix product sums faster than sorting.
FEW_CLUSTERS = 256
# Points in one of these products.
PART = 256
# An empty cluster takes a centroid beside that of a large one: its coordinates by this much longer and shorter in turn,
# for another length alone is no other direction, and the longer of two wins all by inner product.
SPLIT = 1 / 1024


def fit(
    points: Tensor, num_clusters: int, iterations: int, seed: int, metric: str, max_points: int
) -> Tensor:
    """Centroids float32 [P, C, d] of points [P, n, d], n > C. metric: "l2", "ip", or "cosine" of unit points, which has
    unit centroids.

    Fits on at most `max_points` points of each problem, chosen by `seed`, as the first centroids are; an empty
    cluster splits one of the largest.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(points.shape[1], generator=generator)[:max_points].to(points.device)
    sample = points[:, order].float()
    centroids = sample[:, :num_clusters].clone()
    for _ in range(iterations):
        labels = assign(sample, centroids, metric)
        means, sizes = cluster_means(sample, labels, centroids)
        centroids = _fill_empty(means, sizes)
        if metric == "cosine":
            centroids = torch.nn.functional.normalize(centroids, dim=-1)
    return centroids


def assign(points: Tensor, centroids: Tensor, metric: str, sizes: Tensor | None = None) -> Tensor:
    """Nearest centroid by L2, or the one of the largest inner product: int64 [P, n]. Ties take the smallest.

    metric: as of `fit`. sizes: [P, C]; a cluster of size 0 is not chosen.
    """
    less = centroids.square().sum(-1) / 2 if metric == "l2" else centroids.new_zeros(centroids.shape[:2])
    if sizes is not None:
        less = less.masked_fill(sizes == 0, float("inf"))
    return assign_points(points, centroids, less)


def cluster_means(points: Tensor, labels: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of each cluster's points, [P, C, d] (an empty one keeps its `earlier`), and sizes int64 [P, C].

    Points are summed in the order of their clusters, so that two runs agree.
    """
    num_problems, num_clusters, _ = earlier.shape
    sizes = torch.zeros(num_problems, num_clusters, dtype=torch.int64, device=labels.device)
    sizes.scatter_add_(1, labels, torch.ones_like(labels))
    if num_clusters <= FEW_CLUSTERS:
        belongs = labels[:, None] == torch.arange(num_clusters, device=labels.device)[:, None]
        sums = _product_in_parts(belongs.to(earlier.dtype), points.float())
    else:
        sums = sum_members(points, labels.argsort(dim=1, stable=True), sizes)
    means = sums / sizes.clamp(min=1)[..., None]
    return torch.where(sizes[..., None] > 0, means, earlier), sizes


def _product_in_parts(left: Tensor, right: Tensor) -> Tensor:
    """left [P, C, n] @ right [P, n, w], few times few over many: cut along n, so that it is many products."""
    num_rest = right.shape[1] % PART
    cut = right.shape[1] - num_rest
    parts = left[..., :cut].unflatten(-1, (-1, PART)).transpose(1, 2) @ right[:, :cut].unflatten(
        1, (-1, PART)
    )
    return parts.sum(dim=1) + left[..., cut:] @ right[:, cut:]


def _fill_empty(centroids: Tensor, sizes: Tensor) -> Tensor:
    is_empty = sizes == 0
    donors = sizes.argsort(dim=1, descending=True, stable=True)
    donor = donors.gather(1, (is_empty.cumsum(1) - 1).clamp(min=0))
    turns = 1 - 2 * (torch.arange(centroids.shape[-1], device=centroids.device) % 2)
    beside = centroids.gather(1, donor[..., None].expand_as(centroids)) * (1 + SPLIT * turns)
    return torch.where(is_empty[..., None], beside, centroids)
