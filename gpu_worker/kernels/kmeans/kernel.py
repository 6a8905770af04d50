"""K-means rounds in Triton.

Assigning: a program keeps a tile of points and reads every target once, a tile of them at a time; no table of scores is
written. Each column of the tile keeps the best target it has seen, and columns are joined at the end only:
the tensor cores wait for three plain operations a score, not for a reduction. Products of float32 are made of three of
TF32 each, which is as good as float32. Moving: a program adds up the members of one cluster where they lie, in order,
so that two runs agree and no ordered copy of the points is made.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.kernels.kmeans.reference import SHORTEST, SPLIT, Centroids

# Points and targets of a tile, warps and stages: of 16-bit points, and of wider ones, which take three products.
TILES = {2: (128, 32, 4, 4), 4: (64, 64, 4, 2)}
# Of float32 points that fill more than this many lanes: larger tiles take more memory than an SM has.
MOST_WIDE_LANES = 128
WIDE_TILE = (32, 32, 4, 1)
MEMBER_TILE = 64
SIZE_TILE = 1024


def assign_points(points: Tensor, targets: Tensor, less: Tensor | None = None) -> Tensor:
    """See the reference. All on one CUDA device; the points' last stride is 1."""
    num_problems, num_points, width = points.shape
    labels = torch.empty(num_problems, num_points, dtype=torch.int32, device=points.device)
    if labels.numel():
        targets = targets.contiguous()
        less = less if less is None else less.contiguous()
        lanes = max(16, triton.next_power_of_2(width))
        is_wide = points.dtype == torch.float32 and lanes > MOST_WIDE_LANES
        num_rows, num_columns, num_warps, num_stages = WIDE_TILE if is_wide else TILES[points.element_size()]
        assign_tile[(triton.cdiv(num_points, num_rows), num_problems)](
            points, targets, less, labels, *points.stride()[:2], num_points, targets.shape[1],
            WIDTH=width, LANES=lanes, POINTS=num_rows, TARGETS=num_columns,
            STAGES=num_stages, WIDE_DOT=points.dtype == torch.bfloat16 and is_interpreted(), num_warps=num_warps,
        )  # fmt: skip
    return labels


def move_centroids(points: Tensor, order: Tensor, ends: Tensor, is_unit: bool) -> Centroids:
    """See the reference. All on one CUDA device; the points' last stride is 1."""
    num_problems, num_points, width = points.shape
    shape = (*ends.shape, width)
    moved = Centroids(
        means=torch.empty(shape, dtype=torch.float32, device=points.device),
        targets=torch.empty(shape, dtype=points.dtype, device=points.device),
        half_squares=torch.empty(ends.shape, dtype=torch.float32, device=points.device),
    )
    num_clusters = ends.shape[1]
    num_steps = ((num_points + 1) * num_clusters).bit_length()
    if ends.numel():
        move_one[(num_clusters, num_problems)](
            points, order, ends.contiguous(), moved.means, moved.targets, moved.half_squares,
            *points.stride()[:2], num_points, num_clusters, width, num_steps, SPLIT, SHORTEST,
            IS_UNIT=is_unit, LANES=triton.next_power_of_2(width), MEMBERS=MEMBER_TILE, SIZES=SIZE_TILE,
            num_warps=4,
        )  # fmt: skip
    return moved


@triton.jit(do_not_specialize=["num_points"])
def assign_tile(
    points, targets, less, labels, stride_problem, stride_point, num_points, num_targets,
    WIDTH: tl.constexpr, LANES: tl.constexpr, POINTS: tl.constexpr, TARGETS: tl.constexpr, STAGES: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):  # fmt: skip
    """Labels of one tile of points of one problem."""
    problem = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    dims, columns = tl.arange(0, LANES), tl.arange(0, TARGETS)
    is_row, is_dim = rows < num_points, dims < WIDTH
    of_points = points + problem * stride_problem + rows[:, None].to(tl.int64) * stride_point
    tile = tl.load(of_points + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    if WIDE_DOT:
        # The interpreter has no bfloat16 product; on the GPU operands stay narrow and sums are float32.
        tile = tile.to(tl.float32)
    of_targets = targets + problem * num_targets * WIDTH + dims[:, None]
    best = tl.full([POINTS, TARGETS], float("-inf"), tl.float32)
    begin = tl.zeros([POINTS, TARGETS], tl.int32)
    for first in tl.range(0, num_targets, TARGETS, num_stages=STAGES):
        # Beyond the last target it is met again, which changes nothing and needs no mask.
        names = tl.minimum(first + columns, num_targets - 1)
        place = of_targets + names[None, :] * WIDTH
        across = tl.load(place) if LANES == WIDTH else tl.load(place, mask=is_dim[:, None], other=0.0)
        if WIDE_DOT:
            across = across.to(tl.float32)
        scores = tl.dot(tile, across, input_precision="tf32x3")
        if less is not None:
            scores -= tl.load(less + problem * num_targets + names)[None, :]
        # An earlier target keeps what a later one only equals.
        is_better = scores > best
        begin = tl.where(is_better, first, begin)
        best = tl.where(is_better, scores, best)
    is_best = best == tl.max(best, axis=1)[:, None]
    label = tl.min(tl.where(is_best, begin + columns[None, :], num_targets - 1), axis=1)
    tl.store(labels + problem * num_points + rows, label, mask=is_row)


# Of one point, its number would be no tensor.
@triton.jit(do_not_specialize=["num_points", "num_steps"])
def move_one(
    points, order, ends, means, targets, half_squares, stride_problem, stride_point, num_points, num_clusters, width,
    num_steps, split, shortest,
    IS_UNIT: tl.constexpr, LANES: tl.constexpr, MEMBERS: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """The centroid of one cluster of one problem."""
    cluster, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims, lanes = tl.arange(0, LANES), tl.arange(0, MEMBERS)
    is_dim = dims < width
    row = problem * num_clusters + cluster
    source = row
    is_empty = tl.load(ends + row) == tl.load(ends + row - 1, mask=row > 0, other=0)
    if is_empty:
        source = _donor(ends, problem, cluster, num_points, num_clusters, num_steps, SIZES)
    begin, end = tl.load(ends + source - 1, mask=source > 0, other=0), tl.load(ends + source)
    totals = tl.zeros([MEMBERS, LANES], tl.float32)
    of_points = points + problem * stride_problem + dims[None, :]
    for first in range(begin, end, MEMBERS):
        places = first + lanes
        is_member = places < end
        members = tl.load(order + places, mask=is_member, other=0) - problem * num_points
        place = of_points + members[:, None] * stride_point
        totals += tl.load(place, mask=is_member[:, None] & is_dim[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(totals, axis=0) / (end - begin).to(tl.float32)
    mean *= 1 + is_empty.to(tl.float32) * split * (1 - 2 * (dims % 2))
    tl.store(means + row * width + dims, mean, mask=is_dim)
    target = mean
    if IS_UNIT:
        target = mean / tl.maximum(tl.sqrt(tl.sum(mean * mean)), shortest)
    target = target.to(targets.dtype.element_ty)
    tl.store(targets + row * width + dims, target, mask=is_dim)
    rounded = target.to(tl.float32)
    tl.store(half_squares + row, tl.sum(rounded * rounded) / 2)


@triton.jit
def _donor(ends, problem, cluster, num_points, num_clusters, num_steps, SIZES: tl.constexpr):
    """The row of the cluster that an empty one splits: as many are larger as are empty before it."""
    num_before, num_filled = 0, 0
    for first in range(0, num_clusters, SIZES):
        names, sizes = _sizes(ends, problem, num_clusters, first, SIZES)
        num_before += tl.sum(((sizes == 0) & (names < cluster)).to(tl.int32))
        num_filled += tl.sum((sizes > 0).to(tl.int32))
    # At least 1: the compiler fails where it finds that a divisor begins at 0.
    num_larger = num_before % tl.maximum(num_filled, 1)
    # Numbers that order clusters by size, the smaller name first: the highest that more than so many reach is sought.
    low = tl.full([], 0, tl.int64)
    high = (num_points + 1).to(tl.int64) * num_clusters
    for _ in range(num_steps):
        middle = (low + high) // 2
        num_reach = 0
        for first in range(0, num_clusters, SIZES):
            names, sizes = _sizes(ends, problem, num_clusters, first, SIZES)
            num_reach += tl.sum((sizes * num_clusters + num_clusters - 1 - names >= middle).to(tl.int32))
        if num_reach > num_larger:
            low = middle
        else:
            high = middle
    return problem * num_clusters + num_clusters - 1 - low % num_clusters


@triton.jit
def _sizes(ends, problem, num_clusters, first, SIZES: tl.constexpr):
    """Names and sizes of some clusters of one problem; -1 where there is none."""
    names = first + tl.arange(0, SIZES)
    rows = problem * num_clusters + names
    is_name = names < num_clusters
    end = tl.load(ends + rows, mask=is_name, other=-1)
    begin = tl.load(ends + rows - 1, mask=is_name & (rows > 0), other=0)
    return names, tl.where(is_name, end - begin, -1)
