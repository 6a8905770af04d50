"""Split-K decode attention in Triton: a pass over the attended rows of the pool, and one that joins the splits.

`_attend_split`, grid (B * H_kv, splits): a program reads one split of the slots of a (sequence, KV head), each K|V row
once for all query heads of the group, which stand in one tile of at least 16 for `tl.dot`. It leaves the split's
output [group, d] and the log2 of its softmax sum in float32. `_join_splits`, grid (B * H_q): a program weighs the
splits of one query head.

Without splits a batch of one would keep 8 of 132 processors busy. How many there are follows from shapes alone, so
that a captured graph holds for any lengths; how long they are follows from the length on the device, so that all
programs share a short sequence in a wide table. Nearly all traffic is the rows: what the splits leave is a few percent.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.attention.splits import num_splits

# K|V bytes that a program has in flight, at most.
TILE_BYTES = 32768
NUM_STAGES = 3
NUM_WARPS = 4
# Splits that a joining program weighs at a time.
JOIN_TILE = 16
# Of the GPU that the interpreter stands for.
INTERPRETED_PROCESSORS = 132
LOG2_E = tl.constexpr(math.log2(math.e))


def attend_slots(
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    scale: float,
    bias: Tensor | None = None,
    is_padded: bool = True,
) -> Tensor:
    """Attention of one new token over listed slots, for sequences and KV heads of unequal length.

    query: bf16, fp16 or fp32 [B, H_q, d] with d contiguous. pool: [num_slots, 2d] of the query's dtype, a row is K
    then V. slots: int64 or int32 [B, H_kv, A], physical; -1 pads anywhere, and a list of pads only gives zeros. bias:
    float32 [B, H_kv, A], added to the scaled scores (log-degree), or None. is_padded: of no use here, as the masks
    cost nothing. All on one CUDA device. Returns [B, H_q, d] in the query's dtype. Raises ValueError where the dtypes
    or layouts differ from these.
    """
    return _attend(query, pool, slots, slots.shape[2], None, bias, scale)


def attend_blocks(
    query: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    longest: int | None = None,
    is_padded: bool = True,
) -> Tensor:
    """Attention of one new token over the first `lengths` slots of each block table.

    query, pool: as in `attend_slots`. block_tables: int64 or int32 [B, H_kv, M], entries beyond a head's length are
    not read. lengths: int64 or int32 [B, H_kv]; one of 0 gives zeros. longest: the largest of them if the host knows
    it, else the tables' width counts; a captured graph keeps it. is_padded: of no use here. Returns [B, H_q, d] in
    the query's dtype. Raises ValueError where the dtypes or layouts differ from these.
    """
    capacity = block_tables.shape[2] * BLOCK_SIZE
    if longest is not None:
        capacity = min(capacity, longest)
    return _attend(query, pool, block_tables, capacity, lengths, None, scale)


def _attend(
    query: Tensor,
    pool: Tensor,
    table: Tensor,
    capacity: int,
    lengths: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    _check(query, pool)
    batch, num_heads, head_dim = query.shape
    num_kv_heads = table.shape[1]
    group = num_heads // num_kv_heads
    dim_tile = max(16, triton.next_power_of_2(head_dim))
    tile = min(BLOCK_SIZE, max(16, TILE_BYTES // (2 * dim_tile * pool.element_size())))
    splits = num_splits(batch * num_kv_heads, triton.cdiv(capacity, tile), _num_processors(query.device))
    partial = torch.empty(batch * num_kv_heads, splits, group, head_dim, device=query.device)
    partial_lse = torch.empty(batch * num_kv_heads, splits, group, device=query.device)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lengths_strides = (0, 0) if lengths is None else lengths.stride()
    bias_strides = (0, 0, 0) if bias is None else bias.stride()
    _attend_split[(batch * num_kv_heads, splits)](
        query,
        pool,
        table,
        lengths,
        bias,
        partial,
        partial_lse,
        *query.stride()[:2],
        pool.stride(0),
        *table.stride(),
        *lengths_strides,
        *bias_strides,
        capacity,
        scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=BLOCK_SIZE,
        GROUP_TILE=max(16, triton.next_power_of_2(group)),
        DIM_TILE=dim_tile,
        TILE=tile,
        WIDE_DOT=query.dtype == torch.bfloat16 and _is_interpreted(),
        # Products of float32 are sums of ordinary multiply-adds: 4 warps would not hold their operands.
        num_warps=2 * NUM_WARPS if query.dtype == torch.float32 else NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    _join_splits[(batch * num_heads,)](
        partial,
        partial_lse,
        lengths,
        output,
        *lengths_strides,
        capacity,
        splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_TILE=dim_tile,
        TILE=tile,
        JOIN_TILE=JOIN_TILE,
        SPLITS_TILE=triton.next_power_of_2(splits),
        num_warps=NUM_WARPS,
    )
    return output


@triton.jit
def _attend_split(
    query: tl.tensor,
    pool: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    bias: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query_stride_b: tl.tensor,
    query_stride_h: tl.tensor,
    pool_stride: tl.tensor,
    table_stride_b: tl.tensor,
    table_stride_h: tl.tensor,
    table_stride_a: tl.tensor,
    lengths_stride_b: tl.tensor,
    lengths_stride_h: tl.tensor,
    bias_stride_b: tl.tensor,
    bias_stride_h: tl.tensor,
    bias_stride_a: tl.tensor,
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
    length = _length(lengths, batch * lengths_stride_b + kv_head * lengths_stride_h, capacity)
    split_length = tl.cdiv(tl.cdiv(length, TILE), num_splits) * TILE
    begin = split * split_length
    if begin >= length:
        return
    end = tl.minimum(begin + split_length, length)

    heads = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIM_TILE)
    in_group = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query += batch * query_stride_b + kv_head * GROUP * query_stride_h
    q = tl.load(query + heads[:, None] * query_stride_h + dims[None, :], mask=in_group, other=0.0)
    scale *= LOG2_E
    table += batch * table_stride_b + kv_head * table_stride_h
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    output = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
    for first in range(begin, end, TILE):
        place = first + tl.arange(0, TILE)
        attended = place < end
        if lengths is None:
            slot = tl.load(table + place.to(tl.int64) * table_stride_a, mask=attended, other=-1).to(tl.int32)
            attended = slot >= 0
        else:
            block = tl.load(
                table + (place // BLOCK_SIZE).to(tl.int64) * table_stride_a, mask=attended, other=0
            )
            slot = block.to(tl.int32) * BLOCK_SIZE + place % BLOCK_SIZE
        # A slot that is not attended may hold NaN: it is not read, K and V are zero there. Slot ids are int32, which
        # takes the registers for four programs a processor; only what they are multiplied to is int64.
        source = pool + slot[:, None].to(tl.int64) * pool_stride + dims[None, :]
        is_read = attended[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(source, mask=is_read, other=0.0)
        values = tl.load(source + HEAD_DIM, mask=is_read, other=0.0)
        scores = _dot(q, tl.trans(keys), WIDE_DOT) * scale
        if bias is not None:
            added = (
                bias + batch * bias_stride_b + kv_head * bias_stride_h + place.to(tl.int64) * bias_stride_a
            )
            scores += (tl.load(added, mask=attended, other=0.0) * LOG2_E)[None, :]
        scores = tl.where(attended[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # Pads only, so far: -inf - -inf would be NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, axis=1)
        output = output * decay[:, None] + _dot(weights.to(values.dtype), values, WIDE_DOT)
        top = new_top

    # The scratch is [row, split, head of the group, d].
    place = (row * num_splits + split) * GROUP + heads
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], output / total[:, None], mask=in_group)
    tl.store(partial_lse + place, top + tl.log2(total), mask=heads < GROUP)


@triton.jit
def _join_splits(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    lengths: tl.tensor,
    output: tl.tensor,
    lengths_stride_b: tl.tensor,
    lengths_stride_h: tl.tensor,
    capacity: tl.tensor,
    num_splits: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
    JOIN_TILE: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
) -> None:
    query_head = tl.program_id(0).to(tl.int64)
    row, head = query_head // GROUP, query_head % GROUP
    place = row // NUM_KV_HEADS * lengths_stride_b + row % NUM_KV_HEADS * lengths_stride_h
    length = _length(lengths, place, capacity)
    split_length = tl.cdiv(tl.cdiv(length, TILE), num_splits) * TILE
    # The programs of later splits returned without a word.
    num_used = tl.cdiv(length, tl.maximum(split_length, 1))
    partial += (row * num_splits * GROUP + head) * HEAD_DIM
    partial_lse += row * num_splits * GROUP + head
    every = tl.arange(0, SPLITS_TILE)
    every_lse = tl.load(partial_lse + every * GROUP, mask=every < num_used, other=float("-inf"))
    top = tl.max(every_lse, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(every_lse - top), axis=0)

    dims = tl.arange(0, DIM_TILE)
    joined = tl.zeros([DIM_TILE], tl.float32)
    for first in range(0, num_used, JOIN_TILE):
        split = first + tl.arange(0, JOIN_TILE)
        lse = tl.load(partial_lse + split * GROUP, mask=split < num_used, other=float("-inf"))
        source = partial + split[:, None] * (GROUP * HEAD_DIM) + dims[None, :]
        is_read = (split < num_used)[:, None] & (dims < HEAD_DIM)[None, :]
        joined += tl.sum(tl.exp2(lse - top)[:, None] * tl.load(source, mask=is_read, other=0.0), axis=0)
    joined = joined / tl.where(total == 0.0, 1.0, total)
    tl.store(output + query_head * HEAD_DIM + dims, joined.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _length(lengths: tl.tensor, place: tl.tensor, capacity: tl.tensor) -> tl.tensor:
    """Slots of this row: as many as are listed, or as its block table holds."""
    length = capacity
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + place), capacity).to(tl.int32)
    return length


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    # The interpreter has no bfloat16 product; on the GPU operands stay narrow and sums are float32.
    if WIDE:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


def _check(query: Tensor, pool: Tensor) -> None:
    if query.dtype != pool.dtype:
        raise ValueError(f"query is {query.dtype} and pool {pool.dtype}; cast the query")
    if query.stride(2) != 1 or pool.stride(1) != 1:
        raise ValueError("the elements of a head and of a slot must be contiguous")
    if pool.shape[0] > 2**31 - 1:
        raise ValueError(f"{pool.shape[0]} slots: their ids must be less than 2**31")
    if pool.shape[1] != 2 * query.shape[2]:
        raise ValueError(f"a slot of {pool.shape[1]} elements is not K|V of {query.shape[2]} each")


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)
