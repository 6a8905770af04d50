"""Whole-cluster selection as Triton kernels: products, starts, places.

A row is one KV head of one sequence. The place where a cluster starts is the sum of the sizes of all clusters that come
before it, so counting comparisons takes the place of a sort: every program compares its clusters with all others of
the row, tile by tile, and rows spread over all multiprocessors, which a sort in one program would not. Centroids of
unused clusters are not read: an index holds room for the longest sequence. The last pass reads label and place of each
token (8 bytes), looks the start up in a table that stays in the first-level cache, and writes 4 bytes.
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
    begin: Tensor,
    end: Tensor,
) -> Tensor:
    """Minus the place of each token when clusters are taken whole, best inner product first.

    Products are summed over the GQA group; ties take the smaller cluster id.
    query: [B, H_q, d]. centroids: float32 [B, H_kv, C, d]. sizes: int32 [B, H_kv, C], 0 for an unused one.
    labels, within: int32 [B, H_kv, N], cluster of a position and its place in it by ascending position, of any
    strides. begin, end: int64 [B]. Returns float32 [B, H_kv, N]; -inf beyond the candidates. Exact for N <= 2^24.
    All tensors lie on one CUDA device.
    """
    batch, num_kv_heads, num_clusters, head_dim = centroids.shape
    num_positions, num_rows = labels.shape[-1], batch * num_kv_heads
    places = torch.empty(labels.shape, dtype=torch.float32, device=query.device)
    if places.numel() == 0:
        return places
    query, centroids, sizes = query.contiguous(), centroids.contiguous(), sizes.contiguous()
    begin, end = begin.contiguous(), end.contiguous()
    products = torch.empty(sizes.shape, dtype=torch.float32, device=query.device)
    starts = torch.empty(sizes.shape, dtype=torch.int32, device=query.device)
    group = query.shape[1] // num_kv_heads
    blocks = triton.cdiv(num_clusters, BLOCK_CENTROIDS)
    _products[(num_rows * blocks,)](
        query, centroids, sizes, products, num_clusters, head_dim, group, blocks,
        BLOCK=BLOCK_CENTROIDS, WIDTH=triton.next_power_of_2(head_dim),
        GROUP_WIDTH=triton.next_power_of_2(group), num_warps=4,
    )  # fmt: skip
    blocks = triton.cdiv(num_clusters, BLOCK_CLUSTERS)
    _starts[(num_rows * blocks,)](
        products, sizes, starts, num_clusters, blocks, BLOCK=BLOCK_CLUSTERS, num_warps=4
    )
    blocks = triton.cdiv(num_positions, BLOCK_TOKENS)
    _places[(num_rows * blocks,)](
        starts, labels, within, begin, end, places, num_kv_heads, num_clusters, num_positions, blocks,
        *labels.stride(), *within.stride(), BLOCK=BLOCK_TOKENS, num_warps=4,
    )  # fmt: skip
    return places


@triton.jit
def _products(
    query, centroids, sizes, products, num_clusters, head_dim, group, blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP_WIDTH: tl.constexpr,
):  # fmt: skip
    """Inner products of the group's summed query with BLOCK centroids of one row; -inf for unused clusters."""
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
    is_used = tl.load(sizes + row * num_clusters + clusters, mask=is_cluster, other=0) > 0
    centroid = tl.load(
        centroids + row * num_clusters * head_dim + clusters[:, None] * head_dim + dims[None, :],
        mask=is_used[:, None] & is_dim[None, :],
        other=0.0,
    )
    product = tl.where(is_used, tl.sum(centroid * total[None, :], axis=1), float("-inf"))
    tl.store(products + row * num_clusters + clusters, product, mask=is_cluster)


@triton.jit
def _starts(products, sizes, starts, num_clusters, blocks, BLOCK: tl.constexpr):
    """Tokens in the clusters that come before each of BLOCK clusters of one row."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    products += row * num_clusters
    sizes += row * num_clusters
    places = tl.arange(0, BLOCK)
    clusters = block * BLOCK + places
    own = tl.load(products + clusters, mask=clusters < num_clusters, other=float("-inf"))
    size = tl.load(sizes + clusters, mask=clusters < num_clusters, other=0)
    # Nobody asks where an unused cluster starts.
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
            # The room behind the last used cluster is most of an index.
            if tl.max(size, axis=0) > 0:
                product = tl.load(products + others, mask=others < num_clusters, other=float("-inf"))
                before += tl.where(product[None, :] > own[:, None], size[None, :], 0)
        place = row * num_clusters + clusters
        tl.store(starts + place, tl.sum(before, axis=1), mask=clusters < num_clusters)


@triton.jit
def _places(
    starts, labels, within, begin, end, output, num_kv_heads, num_clusters, num_positions, blocks,
    label_stride_batch, label_stride_head, label_stride, within_stride_batch, within_stride_head, within_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Minus the place of BLOCK tokens of one row; -inf where no candidate is."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    sequence, kv_head = row // num_kv_heads, row % num_kv_heads
    positions = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    is_position = positions < num_positions
    first, last = tl.load(begin + sequence), tl.load(end + sequence)
    is_candidate = (positions >= first) & (positions < last) & is_position
    labels += sequence * label_stride_batch + kv_head * label_stride_head
    within += sequence * within_stride_batch + kv_head * within_stride_head
    # What is no candidate may hold any label.
    label = tl.load(labels + positions.to(tl.int64) * label_stride, mask=is_candidate, other=0)
    place = tl.load(within + positions.to(tl.int64) * within_stride, mask=is_candidate, other=0)
    place += tl.load(starts + row * num_clusters + label, mask=is_candidate, other=0)
    place = tl.where(is_candidate, -place.to(tl.float32), float("-inf"))
    tl.store(output + row * num_positions + positions, place, mask=is_position)
