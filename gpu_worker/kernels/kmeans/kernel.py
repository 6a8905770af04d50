"""K-means rounds in Triton.

Assigning: a program keeps a tile of points and meets every centroid once, a tile of them at a time; only the best score
of each point stays, so that no table of scores is written. Products of float32 are made of three of TF32 each, which is
as good as float32. Summing: a program adds up the members of one cluster where they lie, in order, so that two runs
agree and no ordered copy of the points is made.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

POINT_TILE = 64
CENTROID_TILE = 64
MEMBER_TILE = 32


def assign_points(points: Tensor, centroids: Tensor, less: Tensor) -> Tensor:
    """See the reference. All on one CUDA device; points and centroids have a last stride of 1."""
    num_problems, num_points, width = points.shape
    labels = torch.empty(num_problems, num_points, dtype=torch.int64, device=points.device)
    if labels.numel():
        centroids, less = centroids.contiguous(), less.contiguous()
        _assign_points[(triton.cdiv(num_points, POINT_TILE), num_problems)](
            points, centroids, less, labels, *points.stride()[:2], num_points, centroids.shape[1], width,
            WIDTH=max(16, triton.next_power_of_2(width)), POINTS=POINT_TILE, CENTROIDS=CENTROID_TILE,
            num_warps=4,
        )  # fmt: skip
    return labels


def sum_members(points: Tensor, order: Tensor, sizes: Tensor) -> Tensor:
    """See the reference. All on one CUDA device; the points' last stride is 1."""
    num_problems, num_clusters = sizes.shape
    width = points.shape[2]
    sums = torch.empty(num_problems, num_clusters, width, dtype=torch.float32, device=points.device)
    if sums.numel():
        order, ends = order.contiguous(), sizes.cumsum(dim=1)
        _sum_members[(num_clusters, num_problems)](
            points, order, ends, sums, *points.stride()[:2], order.shape[1], num_clusters, width,
            WIDTH=triton.next_power_of_2(width), MEMBERS=MEMBER_TILE, num_warps=4,
        )  # fmt: skip
    return sums


@triton.jit
def _assign_points(
    points, centroids, less, labels, stride_problem, stride_point, num_points, num_centroids, width,
    WIDTH: tl.constexpr, POINTS: tl.constexpr, CENTROIDS: tl.constexpr,
):  # fmt: skip
    """Labels of one tile of points of one problem."""
    problem = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    dims, columns = tl.arange(0, WIDTH), tl.arange(0, CENTROIDS)
    is_row, is_dim = rows < num_points, dims < width
    of_points = points + problem * stride_problem + rows[:, None].to(tl.int64) * stride_point
    tile = tl.load(of_points + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    tile = tile.to(tl.float32)
    best = tl.full([POINTS], float("-inf"), tl.float32)
    label = tl.zeros([POINTS], tl.int32)
    for first in range(0, num_centroids, CENTROIDS):
        names = first + columns
        is_name = names < num_centroids
        place = centroids + (problem * num_centroids + names[None, :]) * width
        across = tl.load(place + dims[:, None], mask=is_dim[:, None] & is_name[None, :], other=0.0)
        taken = tl.load(less + problem * num_centroids + names, mask=is_name, other=float("inf"))
        scores = tl.dot(tile, across, input_precision="tf32x3") - taken[None, :]
        highest = tl.max(scores, axis=1)
        nearest = tl.argmax(scores, axis=1, tie_break_left=True)
        # An earlier centroid keeps what a later one only equals.
        is_better = highest > best
        label = tl.where(is_better, first + nearest, label)
        best = tl.maximum(best, highest)
    tl.store(labels + problem * num_points + rows, label.to(tl.int64), mask=is_row)


@triton.jit
def _sum_members(
    points, order, ends, sums, stride_problem, stride_point, num_points, num_clusters, width,
    WIDTH: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """The sum of one cluster of one problem."""
    cluster, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims, lanes = tl.arange(0, WIDTH), tl.arange(0, MEMBERS)
    is_dim = dims < width
    row = problem * num_clusters + cluster
    end = tl.load(ends + row)
    begin = tl.load(ends + row - 1, mask=cluster > 0, other=0)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(begin, end, MEMBERS):
        places = first + lanes
        is_member = places < end
        members = tl.load(order + problem * num_points + places, mask=is_member, other=0)
        values = tl.load(
            points + problem * stride_problem + members[:, None] * stride_point + dims[None, :],
            mask=is_member[:, None] & is_dim[None, :],
            other=0.0,
        )
        total += tl.sum(values.to(tl.float32), axis=0)
    tl.store(sums + row * width + dims, total, mask=is_dim)
