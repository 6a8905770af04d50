"""The definition of decode attention, in float32 PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_slots(
    query: Tensor, pool: Tensor, slots: Tensor, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Attention of one new token over listed slots, for sequences and KV heads of unequal length.

    query: [B, H_q, d]. pool: [num_slots, 2d], a row is K then V. slots: int64 [B, H_kv, A], physical; -1 pads and
    every list holds at least one slot. bias: float32 [B, H_kv, A], added to the scaled scores (log-degree), or None.
    Returns [B, H_q, d] in the query's dtype. Softmax and sums are float32.
    """
    batch, _num_heads, head_dim = query.shape
    num_kv_heads, width = slots.shape[1:]
    rows = pool.index_select(0, slots.clamp(min=0).flatten()).view(batch, num_kv_heads, width, 2 * head_dim)
    return _attend(query, rows, slots < 0, scale, bias)


def attend_blocks(query: Tensor, pool: Tensor, block_tables: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Attention of one new token over the first `lengths` slots of each block table.

    query: [B, H_q, d]. pool: [num_slots, 2d] in blocks of num_slots_per_block = 64. block_tables: int64
    [B, H_kv, M], entries beyond a head's length are ignored. lengths: int64 [B, H_kv], at least 1.
    Returns [B, H_q, d] in the query's dtype.
    """
    batch, _num_heads, head_dim = query.shape
    num_kv_heads, num_blocks = block_tables.shape[1:]
    blocks = pool.view(-1, BLOCK_SIZE, 2 * head_dim)
    used = torch.arange(num_blocks, device=query.device) * BLOCK_SIZE < lengths[..., None]
    rows = blocks.index_select(0, block_tables.where(used, 0).flatten())
    # To the longest length: a batch of equal lengths, or of one, then needs no mask.
    rows = rows.view(batch, num_kv_heads, num_blocks * BLOCK_SIZE, 2 * head_dim)[:, :, : int(lengths.max())]
    beyond = torch.arange(rows.shape[2], device=query.device) >= lengths[..., None]
    return _attend(query, rows, beyond, scale, None)


BLOCK_SIZE = 64


def _attend(query: Tensor, rows: Tensor, masked: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    batch, num_heads, head_dim = query.shape
    num_kv_heads = rows.shape[1]
    grouped = query.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim).float()
    keys, values = rows[..., :head_dim].float(), rows[..., head_dim:].float()
    scores = grouped @ keys.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias[:, :, None]
    if bool(masked.any()):
        scores = scores.masked_fill(masked[:, :, None], float("-inf"))
        # A masked slot may hold anything, NaN included: 0 * NaN would reach the output.
        values = values.masked_fill(masked[..., None], 0.0)
    output = scores.softmax(dim=-1) @ values
    return output.view(batch, num_heads, head_dim).to(query.dtype)
