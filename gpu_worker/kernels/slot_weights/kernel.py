"""Slot weights in Triton: a pass over the keys, split like decode attention's, and one over the scores that it leaves.

`score_split`, grid (B * H_kv, splits): a program scores one split of the slots of a (sequence, KV head) for the whole
group, which stands in one tile of at least 16 for `tl.dot`, and leaves the scores and, by query head, the log2 of the
split's softmax sum in float32. `weigh`, grid (B * H_kv, tiles): a program joins the splits' sums and writes the mean
weight of each of its slots. A key is read once; a score is 4 bytes, compared with the 256 of a key of 128 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted, num_processors
from gpu_worker.kernels.attention.programs import LOG2_E, dot, row_length
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.attention.splits import MAX_SPLITS, num_splits

# Key bytes that a program has in flight, at most.
TILE_BYTES = 16384
NUM_STAGES = 3
# Scores that a weighing program has of its whole group.
WEIGHED = 4096


def slot_weights(
    query: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    seats: Tensor,
    lengths: Tensor,
    scale: float,
    longest: int,
) -> Tensor:
    """See the reference. All on one CUDA device; the query's and the pool's last strides are 1."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads = block_tables.shape[1]
    group, num_rows = num_heads // num_kv_heads, batch * num_kv_heads
    weights = torch.empty(batch, num_kv_heads, longest, dtype=torch.float32, device=query.device)
    if not weights.numel():
        return weights
    dim_tile, group_width = max(16, triton.next_power_of_2(head_dim)), triton.next_power_of_2(group)
    tile = min(BLOCK_SIZE, max(16, TILE_BYTES // (dim_tile * pool.element_size())))
    capacity = min(block_tables.shape[2] * BLOCK_SIZE, longest)
    num_tiles, processors = triton.cdiv(capacity, tile), num_processors(query.device)
    splits = num_splits(num_rows, num_tiles, processors, may_be_shorter=True)
    scores = torch.empty(num_rows, group, capacity, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(num_rows, splits, group, dtype=torch.float32, device=query.device)
    score_split[(num_rows, splits)](
        query,
        pool,
        block_tables,
        seats,
        lengths,
        scores,
        partial_lse,
        *query.stride()[:2],
        pool.stride(0),
        *block_tables.stride(),
        *lengths.stride(),
        capacity,
        scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=BLOCK_SIZE,
        GROUP_TILE=max(16, group_width),
        DIM_TILE=dim_tile,
        TILE=tile,
        WIDE_DOT=query.dtype == torch.bfloat16 and is_interpreted(),
        num_stages=NUM_STAGES,
    )
    weighed = max(64, min(WEIGHED // group_width, triton.next_power_of_2(longest)))
    weigh[(num_rows, triton.cdiv(longest, weighed))](
        scores,
        partial_lse,
        lengths,
        weights,
        *lengths.stride(),
        capacity,
        longest,
        splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_WIDTH=group_width,
        SPLITS_TILE=MAX_SPLITS,
        TILE=weighed,
    )
    return weights


@triton.jit(do_not_specialize_on_alignment=["seats", "lengths"])
def score_split(
    query: tl.tensor,
    pool: tl.tensor,
    table: tl.tensor,
    seats: tl.tensor,
    lengths: tl.tensor,
    scores: tl.tensor,
    partial_lse: tl.tensor,
    query_stride_b: tl.tensor,
    query_stride_h: tl.tensor,
    pool_stride: tl.tensor,
    table_stride_s: tl.tensor,
    table_stride_h: tl.tensor,
    table_stride_a: tl.tensor,
    lengths_stride_b: tl.tensor,
    lengths_stride_h: tl.tensor,
    capacity: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE_DOT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    batch, kv_head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    length = row_length(lengths, batch * lengths_stride_b + kv_head * lengths_stride_h, capacity)
    split_length = tl.cdiv(tl.cdiv(length, TILE), num_splits) * TILE
    begin = split * split_length
    end = tl.minimum(begin + split_length, length)

    heads = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIM_TILE)
    in_group = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query += batch * query_stride_b + kv_head * GROUP * query_stride_h
    q = tl.load(query + heads[:, None] * query_stride_h + dims[None, :], mask=in_group, other=0.0)
    scale *= LOG2_E
    table += tl.load(seats + batch) * table_stride_s + kv_head * table_stride_h
    scores += row * GROUP * capacity
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    for first in range(begin, end, TILE):
        place = first + tl.arange(0, TILE)
        is_there = place < end
        block = tl.load(table + (place // BLOCK_SIZE).to(tl.int64) * table_stride_a, mask=is_there, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
        # A slot that is not filled may hold NaN: it is not read.
        is_read = is_there[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(pool + slot[:, None] * pool_stride + dims[None, :], mask=is_read, other=0.0)
        found = tl.where(is_there[None, :], dot(q, tl.trans(keys), WIDE_DOT) * scale, float("-inf"))
        target = scores + heads[:, None].to(tl.int64) * capacity + place[None, :]
        tl.store(target, found, mask=(heads < GROUP)[:, None] & is_there[None, :])
        # Every tile that is begun has a slot, so that the maximum is finite.
        new_top = tl.maximum(top, tl.max(found, axis=1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(found - new_top[:, None]), axis=1)
        top = new_top

    # A split without slots counts for nothing: its sum is 2 ** -inf.
    lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
    tl.store(partial_lse + (row * num_splits + split) * GROUP + heads, lse, mask=heads < GROUP)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["lengths"])
def weigh(
    scores: tl.tensor,
    partial_lse: tl.tensor,
    lengths: tl.tensor,
    weights: tl.tensor,
    lengths_stride_b: tl.tensor,
    lengths_stride_h: tl.tensor,
    capacity: tl.tensor,
    longest: tl.tensor,
    num_splits: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    batch, kv_head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    length = row_length(lengths, batch * lengths_stride_b + kv_head * lengths_stride_h, capacity)
    heads, splits = tl.arange(0, GROUP_WIDTH), tl.arange(0, SPLITS_TILE)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)

    source = partial_lse + (row * num_splits + splits[None, :]) * GROUP + heads[:, None]
    is_head = heads < GROUP
    lse = tl.load(source, mask=is_head[:, None] & (splits < num_splits)[None, :], other=float("-inf"))
    top = tl.max(lse, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top[:, None]), axis=1)
    joined = top + tl.log2(tl.where(total == 0.0, 1.0, total))

    is_read = is_head[:, None] & (place < length)[None, :]
    of_group = scores + (row * GROUP + heads[:, None]) * capacity + place[None, :]
    found = tl.load(of_group, mask=is_read, other=float("-inf"))
    mean = tl.sum(tl.exp2(found - joined[:, None]), axis=0) / GROUP
    tl.store(weights + row * longest + place, mean, mask=place < longest)
