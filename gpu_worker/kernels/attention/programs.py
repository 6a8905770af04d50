"""The programs of `kernel.py`: one split of a lane's slots, and the joining of a query head's splits."""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit(do_not_specialize=["num_fixed", "capacity"], do_not_specialize_on_alignment=["seats", "lengths"])
def attend_split(
    query: tl.tensor,
    pool: tl.tensor,
    table: tl.tensor,
    seats: tl.tensor,
    selected: tl.tensor,
    lengths: tl.tensor,
    bias: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query_stride_b: tl.tensor,
    query_stride_h: tl.tensor,
    pool_stride: tl.tensor,
    table_stride_s: tl.tensor,
    table_stride_h: tl.tensor,
    table_stride_a: tl.tensor,
    selected_stride_b: tl.tensor,
    selected_stride_h: tl.tensor,
    selected_stride_a: tl.tensor,
    lengths_stride_b: tl.tensor,
    lengths_stride_h: tl.tensor,
    bias_stride_s: tl.tensor,
    bias_stride_h: tl.tensor,
    bias_stride_a: tl.tensor,
    num_fixed: tl.tensor,
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
    if begin >= length:
        return
    end = tl.minimum(begin + split_length, length)

    heads = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIM_TILE)
    in_group = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query += batch * query_stride_b + kv_head * GROUP * query_stride_h
    q = tl.load(query + heads[:, None] * query_stride_h + dims[None, :], mask=in_group, other=0.0)
    scale *= LOG2_E
    seat = tl.load(seats + batch)
    table += seat * table_stride_s + kv_head * table_stride_h
    if lengths is None:
        selected += batch * selected_stride_b + kv_head * selected_stride_h
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    output = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
    for first in range(begin, end, TILE):
        place = first + tl.arange(0, TILE)
        attended = place < end
        if lengths is None:
            is_fixed = place < num_fixed
            fixed_slot = tl.load(table + place * table_stride_a, mask=attended & is_fixed, other=-1)
            own = (place - num_fixed) * selected_stride_a
            own_slot = tl.load(selected + own, mask=attended & (place >= num_fixed), other=-1)
            # Their maximum would do, but costs up to 30 registers more.
            slot = tl.where(is_fixed, fixed_slot, own_slot)
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
        scores = dot(q, tl.trans(keys), WIDE_DOT) * scale
        if bias is not None:
            added = bias + seat * bias_stride_s + kv_head * bias_stride_h + place.to(tl.int64) * bias_stride_a
            scores += (tl.load(added, mask=attended, other=0.0) * LOG2_E)[None, :]
        scores = tl.where(attended[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # Pads only, so far: -inf - -inf would be NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, axis=1)
        output = output * decay[:, None] + dot(weights.to(values.dtype), values, WIDE_DOT)
        top = new_top

    # The scratch is [row, split, head of the group, d].
    place = (row * num_splits + split) * GROUP + heads
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], output / total[:, None], mask=in_group)
    tl.store(partial_lse + place, top + tl.log2(total), mask=heads < GROUP)


@triton.jit(do_not_specialize=["capacity", "num_splits"], do_not_specialize_on_alignment=["lengths"])
def join_splits(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    lengths: tl.tensor,
    rest_values: tl.tensor,
    rest_log_weights: tl.tensor,
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
    length = row_length(lengths, place, capacity)
    split_length = tl.cdiv(tl.cdiv(length, TILE), num_splits) * TILE
    # The programs of later splits returned without a word.
    num_used = tl.cdiv(length, tl.maximum(split_length, 1))
    partial += (row * num_splits * GROUP + head) * HEAD_DIM
    partial_lse += row * num_splits * GROUP + head
    every = tl.arange(0, SPLITS_TILE)
    every_lse = tl.load(partial_lse + every * GROUP, mask=every < num_used, other=float("-inf"))
    top = tl.max(every_lse, axis=0)
    if rest_values is not None:
        rest = tl.load(rest_log_weights + query_head) * LOG2_E
        top = tl.maximum(top, rest)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(every_lse - top), axis=0)

    dims = tl.arange(0, DIM_TILE)
    joined = tl.zeros([DIM_TILE], tl.float32)
    if rest_values is not None:
        weight = tl.exp2(rest - top)
        total += weight
        joined += weight * tl.load(
            rest_values + query_head * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0
        )
    for first in range(0, num_used, JOIN_TILE):
        split = first + tl.arange(0, JOIN_TILE)
        lse = tl.load(partial_lse + split * GROUP, mask=split < num_used, other=float("-inf"))
        source = partial + split[:, None] * (GROUP * HEAD_DIM) + dims[None, :]
        is_read = (split < num_used)[:, None] & (dims < HEAD_DIM)[None, :]
        joined += tl.sum(tl.exp2(lse - top)[:, None] * tl.load(source, mask=is_read, other=0.0), axis=0)
    joined = joined / tl.where(total == 0.0, 1.0, total)
    tl.store(output + query_head * HEAD_DIM + dims, joined.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def row_length(lengths: tl.tensor, place: tl.tensor, capacity: tl.tensor) -> tl.tensor:
    """Slots of this lane: as many as are listed, or as its block table holds."""
    length = capacity
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + place), capacity).to(tl.int32)
    return length


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    # The interpreter has no bfloat16 product; on the GPU operands stay narrow and sums are float32.
    if WIDE:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product
