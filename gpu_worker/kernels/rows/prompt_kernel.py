"""Rows of prefilled layers put into slots, all or what is kept of them, or taken from there, in one launch: every layer
of a prompt has one.

A program for every 16 slots of a head; where rows are kept for the empty slots too, and the first program of a head
counts those that are filled.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.attention.reference import BLOCK_SIZE

SLOTS = 16
# Positions that are counted at a time.
COUNTED = 1024


def keep_rows(
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    held: Tensor,
    lengths: Tensor,
    limits: Tensor,
    seat: int,
    layer: int,
    room: int,
) -> None:
    """See the reference. All on one CUDA device."""
    num_rows, num_kept, head_dim = keys.shape
    assert pool.is_contiguous(), "the pool is written in place"
    assert keys.stride(2) == values.stride(2) == 1, "a row's elements lie side by side"
    num_heads, num_blocks = block_tables.shape[2:]
    width = held.shape[3]
    _keep_rows[(max(1, triton.cdiv(width, SLOTS)), num_rows)](
        positions, keys, values, pool, block_tables[seat], held[seat], lengths[seat], limits[seat],
        layer * num_heads, room, num_kept, width, num_blocks,
        *positions.stride(), *keys.stride()[:2], *values.stride()[:2],
        HEAD_DIM=head_dim, ROW=pool.shape[1], DIMS=triton.next_power_of_2(head_dim), BLOCK=BLOCK_SIZE, SLOTS=SLOTS,
        COUNTED=COUNTED, num_warps=4,
    )  # fmt: skip


def store_prompt(rows: Tensor, pool: Tensor, block_tables: Tensor, seat: int, layer: int) -> None:
    """See the reference. All on one CUDA device."""
    num_stored, num_heads, num_tokens, row = rows.shape
    if num_tokens == 0:
        return
    assert pool.is_contiguous(), "the pool is written in place"
    assert rows.stride(3) == 1, "a row's elements lie side by side"
    num_blocks = block_tables.shape[3]
    _store_prompt[(triton.cdiv(num_tokens, SLOTS), num_stored * num_heads)](
        rows, pool, block_tables[seat], layer * num_heads, num_tokens, num_heads, num_blocks,
        *rows.stride()[:3], ROW=row, WIDTH=triton.next_power_of_2(row), BLOCK=BLOCK_SIZE, SLOTS=SLOTS, num_warps=4,
    )  # fmt: skip


def load_prompt(rows: Tensor, pool: Tensor, blocks: Tensor) -> None:
    """See the reference. All on one CUDA device."""
    num_heads, num_tokens, row = rows.shape
    if num_tokens == 0:
        return
    assert pool.is_contiguous(), "rows of the pool lie one behind the other"
    assert rows.stride(2) == 1, "a row's elements lie side by side"
    _load_prompt[(triton.cdiv(num_tokens, SLOTS), num_heads)](
        rows, pool, blocks, num_tokens, blocks.shape[1],
        *rows.stride()[:2], ROW=row, WIDTH=triton.next_power_of_2(row), BLOCK=BLOCK_SIZE, SLOTS=SLOTS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"], do_not_specialize_on_alignment=["blocks"])
def _load_prompt(
    rows, pool, blocks, num_tokens, num_blocks, row_head, row_token,
    ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """SLOTS tokens of one head."""
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    is_token = slot < num_tokens
    block = tl.load(blocks + head * num_blocks + slot // BLOCK, mask=is_token, other=0)
    column = tl.arange(0, WIDTH)[None, :]
    mask = is_token[:, None] & (column < ROW)
    row = tl.load(pool + (block * BLOCK + slot % BLOCK)[:, None] * ROW + column, mask=mask)
    tl.store(rows + head * row_head + slot.to(tl.int64)[:, None] * row_token + column, row, mask=mask)


@triton.jit(do_not_specialize=["first_place", "num_tokens", "num_blocks", "row_layer"])
def _store_prompt(
    rows, pool, block_tables, first_place, num_tokens, num_heads, num_blocks, row_layer, row_head, row_token,
    ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """SLOTS tokens of one head of one layer. first_place: as `_keep_rows` has it."""
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    is_token = slot < num_tokens
    block = tl.load(block_tables + (first_place + head) * num_blocks + slot // BLOCK, mask=is_token, other=0)
    column = tl.arange(0, WIDTH)[None, :]
    mask = is_token[:, None] & (column < ROW)
    source = rows + head // num_heads * row_layer + head % num_heads * row_head
    row = tl.load(source + slot.to(tl.int64)[:, None] * row_token + column, mask=mask)
    tl.store(pool + (block * BLOCK + slot % BLOCK)[:, None] * ROW + column, row, mask=mask)


@triton.jit(
    do_not_specialize=["first_place", "room", "num_kept", "width", "position_head"],
    do_not_specialize_on_alignment=["positions"],
)
def _keep_rows(
    positions, keys, values, pool, block_tables, held, lengths, limits,
    first_place, room, num_kept, width, num_blocks,
    position_head, position_slot, key_head, key_slot, value_head, value_slot,
    HEAD_DIM: tl.constexpr, ROW: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """SLOTS slots of one head of one layer. first_place: of the first layer's first head among the seat's."""
    head = tl.program_id(1).to(tl.int64)
    place = first_place + head
    positions += head * position_head
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    position = tl.load(positions + slot * position_slot, mask=slot < num_kept, other=-1)
    tl.store(held + place * width + slot, position, mask=slot < width)
    is_kept = position >= 0
    block = tl.load(block_tables + place * num_blocks + slot // BLOCK, mask=is_kept, other=0)
    dims = tl.arange(0, DIMS)[None, :]
    mask = is_kept[:, None] & (dims < HEAD_DIM)
    slots = slot.to(tl.int64)[:, None]
    key = tl.load(keys + head * key_head + slots * key_slot + dims, mask=mask)
    value = tl.load(values + head * value_head + slots * value_slot + dims, mask=mask)
    target = pool + (block * BLOCK + slot % BLOCK)[:, None] * ROW + dims
    tl.store(target, key, mask=mask)
    tl.store(target + HEAD_DIM, value, mask=mask)
    if tl.program_id(0) == 0:
        count = tl.full([], 0, tl.int32)
        for begin in range(0, num_kept, COUNTED):
            one = begin + tl.arange(0, COUNTED)
            found = tl.load(positions + one * position_slot, mask=one < num_kept, other=-1)
            count += tl.sum((found >= 0).to(tl.int32), axis=0)
        tl.store(lengths + place, count)
        tl.store(limits + place, count + room)
