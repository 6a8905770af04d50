"""Whole-cluster selection as Triton kernels: products, starts, places.

A head here is one KV head of one lane. The place where a cluster starts is the sum of the sizes of all clusters that
come before it, so counting comparisons takes the place of a sort: every program compares its clusters with all others
of the head, tile by tile, and heads spread over all multiprocessors, which a sort in one program would not. Centroids
of unused clusters are not read: an index has space for the longest sequence. The last pass reads label and place of
each token (8 bytes), looks the start up in a table that stays in the first-level cache, and writes 4 bytes.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_CENTROIDS = 32
BLOCK_CLUSTERS = 64
BLOCK_TOKENS = 2048


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
    """See the reference. All tensors lie on one CUDA device; labels and within may have any strides, centroids and
    sizes be views of one layer."""
    num_kv_heads, num_clusters, head_dim = centroids.shape[1:]
    batch, num_rows = query.shape[0], query.shape[0] * num_kv_heads
    places = torch.empty(batch, num_kv_heads, num_positions, dtype=torch.float32, device=query.device)
    if places.numel() == 0:
        return places
    query, seats, begin, end = query.contiguous(), seats.contiguous(), begin.contiguous(), end.contiguous()
    products = torch.empty(num_rows, num_clusters, dtype=torch.float32, device=query.device)
    starts = torch.empty(num_rows, num_clusters, dtype=torch.int32, device=query.device)
    group = query.shape[1] // num_kv_heads
    blocks = triton.cdiv(num_clusters, BLOCK_CENTROIDS)
    _products[(num_rows * blocks,)](
        query, centroids, sizes, seats, products, num_kv_heads, num_clusters, head_dim, group, blocks,
        *centroids.stride()[:2], *sizes.stride()[:2], BLOCK=BLOCK_CENTROIDS,
        WIDTH=triton.next_power_of_2(head_dim), GROUP_WIDTH=triton.next_power_of_2(group), num_warps=4,
    )  # fmt: skip
    blocks = triton.cdiv(num_clusters, BLOCK_CLUSTERS)
    _starts[(num_rows * blocks,)](
        products, sizes, seats, starts, num_kv_heads, num_clusters, blocks, *sizes.stride()[:2],
        BLOCK=BLOCK_CLUSTERS, num_warps=4,
    )  # fmt: skip
    blocks = triton.cdiv(num_positions, BLOCK_TOKENS)
    _places[(num_rows * blocks,)](
        starts, labels, within, seats, begin, end, places, num_kv_heads, num_clusters, num_positions, blocks,
        *labels.stride(), *within.stride(), BLOCK=BLOCK_TOKENS, num_warps=4,
    )  # fmt: skip
    return places


@triton.jit
def _of_row(index, seats, row, num_kv_heads, stride_seat, stride_head):
    """Where a head's part of an index tensor begins."""
    return index + tl.load(seats + row // num_kv_heads) * stride_seat + row % num_kv_heads * stride_head


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["seats"])
def _products(
    query, centroids, sizes, seats, products, num_kv_heads, num_clusters, head_dim, group, blocks,
    centroid_stride_seat, centroid_stride_head, size_stride_seat, size_stride_head,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP_WIDTH: tl.constexpr,
):  # fmt: skip
    """Inner products of the group's summed query with BLOCK centroids of one head; -inf for unused clusters."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    clusters = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    dims, heads = tl.arange(0, WIDTH), tl.arange(0, GROUP_WIDTH)
    is_dim, is_cluster = dims < head_dim, clusters < num_clusters
    vectors = tl.load(
        query + (row * group + heads[:, None]) * head_dim + dims[None, :],
        mask=(heads < group)[:, None] & is_dim[None, :],
        other=0.0,
    )
    total = tl.sum(vectors.to(tl.float32), axis=0)
    sizes = _of_row(sizes, seats, row, num_kv_heads, size_stride_seat, size_stride_head)
    centroids = _of_row(centroids, seats, row, num_kv_heads, centroid_stride_seat, centroid_stride_head)
    is_used = tl.load(sizes + clusters, mask=is_cluster, other=0) > 0
    centroid = tl.load(
        centroids + clusters[:, None] * head_dim + dims[None, :],
        mask=is_used[:, None] & is_dim[None, :],
        other=0.0,
    )
    product = tl.where(is_used, tl.sum(centroid * total[None, :], axis=1), float("-inf"))
    tl.store(products + row * num_clusters + clusters, product, mask=is_cluster)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["seats"])
def _starts(
    products, sizes, seats, starts, num_kv_heads, num_clusters, blocks, size_stride_seat, size_stride_head,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens in the clusters that come before each of BLOCK clusters of one head."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    products += row * num_clusters
    sizes = _of_row(sizes, seats, row, num_kv_heads, size_stride_seat, size_stride_head)
    places = tl.arange(0, BLOCK)
    clusters = block * BLOCK + places
    own = tl.load(products + clusters, mask=clusters < num_clusters, other=float("-inf"))
    size = tl.load(sizes + clusters, mask=clusters < num_clusters, other=0)
    # The start of an unused cluster is never read.
    if tl.max(size, axis=0) > 0:
        is_before = (own[None, :] > own[:, None]) | (
            (own[None, :] == own[:, None]) & (places[None, :] < places[:, None])
        )
        # Summed by column, so that rows are reduced across threads only once.
        before = tl.where(is_before, size[None, :], 0)
        # Of equals the smaller id comes first: all of an earlier block, none of a later one.
        for first in range(0, block * BLOCK, BLOCK):
            product = tl.load(products + first + places)
            size = tl.load(sizes + first + places)
            before += tl.where(product[None, :] >= own[:, None], size[None, :], 0)
        for first in range((block + 1) * BLOCK, num_clusters, BLOCK):
            others = first + places
            size = tl.load(sizes + others, mask=others < num_clusters, other=0)
            # Most of an index lies behind the last used cluster.
            if tl.max(size, axis=0) > 0:
                product = tl.load(products + others, mask=others < num_clusters, other=float("-inf"))
                before += tl.where(product[None, :] > own[:, None], size[None, :], 0)
        place = row * num_clusters + clusters
        tl.store(starts + place, tl.sum(before, axis=1), mask=clusters < num_clusters)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["seats", "begin", "end"])
def _places(
    starts, labels, within, seats, begin, end, output, num_kv_heads, num_clusters, num_positions, blocks,
    label_stride_seat, label_stride_head, label_stride, within_stride_seat, within_stride_head, within_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Minus the place of BLOCK tokens of one head; -inf where no candidate is."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    sequence = row // num_kv_heads
    positions = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    is_position = positions < num_positions
    first, last = tl.load(begin + sequence), tl.load(end + sequence)
    is_candidate = (positions >= first) & (positions < last) & is_position
    labels = _of_row(labels, seats, row, num_kv_heads, label_stride_seat, label_stride_head)
    within = _of_row(within, seats, row, num_kv_heads, within_stride_seat, within_stride_head)
    # What is no candidate may hold any label.
    label = tl.load(labels + positions.to(tl.int64) * label_stride, mask=is_candidate, other=0)
    place = tl.load(within + positions.to(tl.int64) * within_stride, mask=is_candidate, other=0)
    place += tl.load(starts + row * num_clusters + label, mask=is_candidate, other=0)
    place = tl.where(is_candidate, -place.to(tl.float32), float("-inf"))
    tl.store(output + row * num_positions + positions, place, mask=is_position)
