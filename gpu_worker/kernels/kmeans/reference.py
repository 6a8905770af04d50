"""The definition of assigning points and moving centroids, in float32 PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Names of a short type are sorted in half as many passes.
MAX_SHORT = torch.iinfo(torch.int16).max

# Scores of points against centroids that exist at one time.
MAX_SCORES = 1 << 28
# An empty cluster takes a centroid beside that of a large one: its coordinates by this much longer and shorter in turn,
# for another length alone is no other direction, and the longer of two wins all by inner product.
SPLIT = 1 / 1024
# What a length is divided by at least, so that zero has a direction: none.
SHORTEST = 1e-12


@dataclass(frozen=True, slots=True)
class Centroids:
    """means: float32 [P, C, d]. targets: [P, C, d], what points are compared with: the means, or their directions, of
    the points' type. half_squares: float32 [P, C], half of the targets' squared lengths."""

    means: Tensor
    targets: Tensor
    half_squares: Tensor


def assign_points(points: Tensor, targets: Tensor, less: Tensor | None = None) -> Tensor:
    """The target with the largest inner product less its own number: int32 [P, n]. Ties take the smallest.

    points: [P, n, d]. targets: [P, C, d] of the same type, multiplied exactly and added in float32. less: float32
    [P, C]; infinity for a target that no point may have, if each problem has one that may be; None: 0.
    """
    num_problems, num_points, _ = points.shape
    chunk = max(1, MAX_SCORES // max(1, num_problems * targets.shape[1]))
    labels = [points.new_empty(num_problems, 0, dtype=torch.int32)]
    for begin in range(0, num_points, chunk):
        scores = points[:, begin : begin + chunk].float() @ targets.float().mT
        if less is not None:
            scores -= less[:, None]
        labels.append(scores.argmax(dim=-1).int())
    return torch.cat(labels, dim=1)


def move_centroids(points: Tensor, order: Tensor, ends: Tensor, is_unit: bool) -> Centroids:
    """Every centroid at the mean of its members; an empty cluster's beside that of a large one.

    points: [P, n, d]. order: int64 [P n], ends: int64 [P, C], as `sort_members` gives them. is_unit: targets are the
    means' directions. The i-th empty cluster of a problem splits the i-th largest, ties by number, and starting again
    with the largest after the last that has members. A problem has at least one point.
    """
    width = points.shape[2]
    sizes = cluster_sizes(ends)
    ordered = points.float().reshape(-1, width)[order]
    sums = torch.segment_reduce(ordered, "sum", lengths=sizes.flatten(), unsafe=True, initial=0)
    means = sums.view(*ends.shape, width) / sizes.clamp(min=1)[..., None]
    is_empty = sizes == 0
    donors = sizes.argsort(dim=1, descending=True, stable=True)
    turn = (is_empty.cumsum(1) - 1).clamp(min=0) % (~is_empty).sum(1, keepdim=True)
    donor = donors.gather(1, turn)
    signs = 1 - 2 * (torch.arange(width, device=points.device) % 2)
    beside = means.gather(1, donor[..., None].expand_as(means)) * (1 + SPLIT * signs)
    means = torch.where(is_empty[..., None], beside, means)
    targets = torch.nn.functional.normalize(means, dim=-1, eps=SHORTEST) if is_unit else means
    targets = targets.to(points.dtype)
    return Centroids(means, targets, targets.float().square().sum(-1) / 2)


def sort_members(labels: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Where the points of each cluster are: order int64 [P n], ends int64 [P, C].

    order: places p n + i, those of problem 0's cluster 0 first, then of its cluster 1, ..., each cluster's by ascending
    i. ends: each cluster's end in it. labels: whole numbers [P, n] below `num_clusters`. One stable sort for all
    problems, by the clusters' names among all, not one for each.
    """
    num_problems = labels.shape[0]
    total = num_problems * num_clusters
    dtype = torch.int16 if total <= MAX_SHORT else torch.int32
    clusters = torch.arange(total, device=labels.device, dtype=dtype)
    names = labels + clusters.view(num_problems, num_clusters)[:, :1]
    names, order = names.to(dtype).flatten().sort(stable=True)
    return order, torch.searchsorted(names, clusters, right=True).view(num_problems, num_clusters)


def cluster_sizes(ends: Tensor) -> Tensor:
    """Number of points of each cluster, of the ends that `sort_members` gives: int64 [P, C]."""
    return torch.diff(ends.flatten(), prepend=ends.new_zeros(1)).view_as(ends)
