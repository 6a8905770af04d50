"""Lloyd's K-means (1982) for many independent problems at once, without the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_worker.kernels.kmeans import Centroids, assign_points, move_centroids

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# Of a short type the sort of the labels takes half as many passes.
MAX_SHORT = torch.iinfo(torch.int16).max


def fit(
    points: Tensor, num_clusters: int, iterations: int, seed: int, metric: str
) -> tuple[Centroids, Tensor]:
    """Centroids of points [P, n, d], n > C, and how many points the last iteration gave to each: int64 [P, C].

    metric: "l2", "ip", or "cosine", which compares with the centroids' directions. The first centroids are points
    spread evenly over all, from one that the seed chooses. An empty cluster splits one of the largest.
    """
    num_problems, num_points, _ = points.shape
    is_unit = metric == "cosine"
    # Each of the first has one member.
    order = torch.arange(num_problems * num_clusters, device=points.device)
    ends = order.view(num_problems, num_clusters) + 1
    places = spread(num_points, num_clusters, seed, points.device)
    centroids = move_centroids(points[:, places], order, ends, is_unit)
    for _ in range(iterations):
        order, ends = members(assign(points, centroids, metric), num_clusters)
        centroids = move_centroids(points, order, ends, is_unit)
    return centroids, torch.diff(ends.flatten(), prepend=ends.new_zeros(1)).view_as(ends)


def assign(points: Tensor, centroids: Centroids, metric: str, sizes: Tensor | None = None) -> Tensor:
    """Nearest target by L2, or the one of the largest inner product: int32 [P, n]. Ties take the smallest.

    metric: as of `fit`. sizes: [P, C]; a cluster of size 0 is not chosen.
    """
    less = centroids.half_squares if metric == "l2" else None
    if sizes is not None:
        less = torch.zeros_like(centroids.half_squares) if less is None else less
        less = less.masked_fill(sizes == 0, float("inf"))
    return assign_points(points, centroids.targets, less)


def spread(num_points: int, num_chosen: int, seed: int, device: torch.device) -> Tensor:
    """Different places among the points, int64 [num_chosen], any first of them spread evenly over all.

    Multiples of the golden ratio (Weyl's sequence), in whole numbers: no table must come from the host, and all devices
    choose alike.
    """
    step = max(1, round(GOLDEN_RATIO * num_points))
    while math.gcd(step, num_points) > 1:
        step += 1
    return (torch.arange(num_chosen, device=device) * step + seed % num_points) % num_points


def members(labels: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Points in the order of their clusters, as `move_centroids` takes them: order int64 [P n], ends int64 [P, C].

    labels: int32 [P, n]. One stable sort for all problems, of the names of their clusters among all.
    """
    num_problems = labels.shape[0]
    total = num_problems * num_clusters
    short = torch.int16 if total <= MAX_SHORT else torch.int32
    before = torch.arange(0, total, num_clusters, device=labels.device, dtype=torch.int32)
    names, order = (labels + before[:, None]).to(short).flatten().sort(stable=True)
    clusters = torch.arange(total, device=labels.device, dtype=short)
    return order, torch.searchsorted(names, clusters, right=True).view(num_problems, num_clusters)
