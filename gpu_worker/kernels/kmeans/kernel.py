"""Launches of a K-means round's programs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.kernels.kmeans.programs import assign_tile, move_one
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
