"""The same in Triton: one program for each KV head of a sequence, which reads its keys twice.

The first pass finds each query head's maximum and sum as they grow, the second writes the mean of the heads' weights.
Keys of a budget's size come from the second level cache the second time; nothing of a group's size is written.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.attention.reference import BLOCK_SIZE


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
    group = num_heads // num_kv_heads
    weights = torch.empty(batch, num_kv_heads, longest, dtype=torch.float32, device=query.device)
    if weights.numel():
        _slot_weights[(batch * num_kv_heads,)](
            query, pool, block_tables, seats, lengths, weights,
            *query.stride()[:2], pool.stride(0), *block_tables.stride(), *lengths.stride(),
            scale, longest, num_kv_heads, group, head_dim,
            BLOCK=BLOCK_SIZE, GROUP_WIDTH=triton.next_power_of_2(group),
            WIDTH=triton.next_power_of_2(head_dim), num_warps=4,
        )  # fmt: skip
    return weights


@triton.jit
def _scores(
    keys_of, stride_block, vectors, pool, stride_slot, block, dims, is_dim, slots, length, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Scaled scores [GROUP, BLOCK] of a block's slots; -inf where none is filled."""
    row = (tl.load(keys_of + block * stride_block).to(tl.int64) * BLOCK + slots) * stride_slot
    is_filled = block * BLOCK + slots < length
    keys = tl.load(pool + row[:, None] + dims[None, :], mask=is_filled[:, None] & is_dim[None, :], other=0.0)
    products = tl.sum(vectors[:, None, :] * keys.to(tl.float32)[None, :, :], axis=2)
    return tl.where(is_filled[None, :], products * scale, float("-inf"))


@triton.jit
def _slot_weights(
    query, pool, block_tables, seats, lengths, weights,
    stride_row, stride_head, stride_slot, stride_seat, stride_kv_head, stride_block, stride_length, stride_of_head,
    scale, longest, num_kv_heads, group, head_dim,
    BLOCK: tl.constexpr, GROUP_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Weights of all slots of one KV head of one sequence."""
    row, kv_head = (tl.program_id(0) // num_kv_heads).to(tl.int64), tl.program_id(0) % num_kv_heads
    seat = tl.load(seats + row)
    length = tl.load(lengths + row * stride_length + kv_head * stride_of_head).to(tl.int32)
    length = tl.minimum(length, longest)
    dims, heads, slots = tl.arange(0, WIDTH), tl.arange(0, GROUP_WIDTH), tl.arange(0, BLOCK)
    is_dim, is_head = dims < head_dim, heads < group
    vectors = tl.load(
        query + row * stride_row + (kv_head * group + heads[:, None]) * stride_head + dims[None, :],
        mask=is_head[:, None] & is_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    keys_of = block_tables + seat * stride_seat + kv_head * stride_kv_head
    highest = tl.full([GROUP_WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_WIDTH], tl.float32)
    for block in range(0, tl.cdiv(length, BLOCK)):
        scores = _scores(
            keys_of,
            stride_block,
            vectors,
            pool,
            stride_slot,
            block,
            dims,
            is_dim,
            slots,
            length,
            scale,
            BLOCK,
        )
        above = tl.maximum(highest, tl.max(scores, axis=1))
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(scores - above[:, None]), axis=1)
        highest = above
    out = weights + tl.program_id(0).to(tl.int64) * longest
    for block in range(0, tl.cdiv(longest, BLOCK)):
        place = block * BLOCK + slots
        mean = tl.zeros([BLOCK], tl.float32)
        if block * BLOCK < length:
            scores = _scores(
                keys_of,
                stride_block,
                vectors,
                pool,
                stride_slot,
                block,
                dims,
                is_dim,
                slots,
                length,
                scale,
                BLOCK,
            )
            shares = tl.exp(scores - highest[:, None]) / total[:, None]
            mean = tl.sum(tl.where(is_head[:, None], shares, 0.0), axis=0) / group
        tl.store(out + place, mean, mask=place < longest)
