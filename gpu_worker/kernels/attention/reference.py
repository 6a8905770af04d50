"""The definition of decode attention, in float32 PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_slots(
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    scale: float,
    bias: Tensor | None = None,
    is_padded: bool = True,
) -> Tensor:
    """Attention of one new token over listed slots, for sequences and KV heads of unequal length.

    query: [B, H_q, d]. pool: [num_slots, 2d], a row is K then V. slots: int64 [B, H_kv, A], physical; -1 pads and
    every list holds at least one slot. bias: float32 [B, H_kv, A], added to the scaled scores (log-degree), or None.
    is_padded: False promises that no -1 is there, and saves the masks. Returns [B, H_q, d] in the query's dtype.
    Softmax and sums are float32.
    """
    batch, _num_heads, head_dim = query.shape
    num_kv_heads, width = slots.shape[1:]
    listed = slots.clamp(min=0) if is_padded else slots
    rows = pool.index_select(0, listed.flatten()).view(batch, num_kv_heads, width, 2 * head_dim)
    return _attend(query, rows, slots < 0 if is_padded else None, scale, bias)


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

    query: [B, H_q, d]. pool: [num_slots, 2d] in blocks of num_slots_per_block = 64. block_tables: int64
    [B, H_kv, M], entries beyond a head's length are ignored. lengths: int64 [B, H_kv], at least 1. longest: the
    largest of them, from who knows it; to read it here would synchronise with the host. is_padded: False promises
    that all are that long, and saves the masks. Returns [B, H_q, d] in the query's dtype.
    """
    batch, _num_heads, head_dim = query.shape
    num_kv_heads, num_blocks = block_tables.shape[1:]
    blocks = pool.view(-1, BLOCK_SIZE, 2 * head_dim)
    if longest is None:
        longest = int(lengths.max())
    num_blocks = min(num_blocks, -(-longest // BLOCK_SIZE))
    block_tables, masked = block_tables[..., :num_blocks], None
    if is_padded:
        used = torch.arange(num_blocks, device=query.device) * BLOCK_SIZE < lengths[..., None]
        block_tables = block_tables.where(used, 0)
        masked = torch.arange(longest, device=query.device) >= lengths[..., None]
    rows = blocks.index_select(0, block_tables.flatten())
    rows = rows.view(batch, num_kv_heads, num_blocks * BLOCK_SIZE, 2 * head_dim)[:, :, :longest]
    return _attend(query, rows, masked, scale, None)


BLOCK_SIZE = 64


def _attend(query: Tensor, rows: Tensor, masked: Tensor | None, scale: float, bias: Tensor | None) -> Tensor:
    batch, num_heads, head_dim = query.shape
    num_kv_heads = rows.shape[1]
    grouped = query.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim).float()
    keys, values = rows[..., :head_dim].float(), rows[..., head_dim:].float()
    scores = grouped @ keys.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias[:, :, None]
    if masked is not None:
        scores = scores.masked_fill(masked[:, :, None], float("-inf"))
        # A masked slot may hold anything, NaN included: 0 * NaN would reach the output.
        values = values.masked_fill(masked[..., None], 0.0)
    output = scores.softmax(dim=-1) @ values
    return output.view(batch, num_heads, head_dim).to(query.dtype)
