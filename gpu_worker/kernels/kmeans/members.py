"""Points in the order of their clusters."""

from __future__ import annotations

import torch
from torch import Tensor

# Names of a short type are sorted in half as many passes.
MAX_SHORT = torch.iinfo(torch.int16).max


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
