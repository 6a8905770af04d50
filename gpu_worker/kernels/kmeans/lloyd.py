"""Lloyd's K-means (1982) for many independent problems at once, without the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_worker.kernels.kmeans import Centroids, assign_points, cluster_sizes, move_centroids, sort_members

# Iterations by default: no CPU time has to be hidden on a device.
DEFAULT_ITERATIONS = 10
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# Of a point: its label, its cluster's name, and its place in two rounds' orders, with the copies that a sort makes.
POINT_BYTES = 64
# Of a cluster in addition to its centroid: where its members end, how many they are, and what it asks of a point.
CLUSTER_BYTES = 96


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
        order, ends = sort_members(assign(points, centroids, metric), num_clusters)
        centroids = move_centroids(points, order, ends, is_unit)
    return centroids, cluster_sizes(ends)


def fit_bytes(points: Tensor, num_clusters: int) -> int:
    """Most bytes alive on a GPU, without the points, while they are fitted, and then assigned once more. points: as
    of `fit`, of which the shape and the type count."""
    num_problems, num_points, width = points.shape
    # Two rounds' means, and the targets in the points' type.
    centroid = 2 * width * (4 + points.itemsize) + CLUSTER_BYTES
    return num_problems * (num_points * POINT_BYTES + num_clusters * centroid)


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

    Multiples of the golden ratio (Weyl's sequence), in whole numbers, so that no table comes from the host and all
    devices choose the same.
    """
    step = max(1, round(GOLDEN_RATIO * num_points))
    while math.gcd(step, num_points) > 1:
        step += 1
    return (torch.arange(num_chosen, device=device) * step + seed % num_points) % num_points
