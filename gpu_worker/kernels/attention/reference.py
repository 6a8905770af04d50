"""Decode attention: the plain definition in float32, and the same through PyTorch's fused attention on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Rest:
    """An approximate row per query head for tokens that are not attended. values: float32 [B, H_q, d], finite.
    log_weights: float32 [B, H_q], as softmax has them: of the sum of the tokens' weights; -inf where there are none.
    ready: is called before both are read, for the current stream to wait where another one writes them."""

    values: Tensor
    log_weights: Tensor
    ready: Callable[[], None] = lambda: None

    @classmethod
    def room(cls, query: Tensor, ready: Callable[[], None] = lambda: None) -> Rest:
        """For a query [B, H_q, d], yet to be written."""
        values = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        return cls(values, torch.empty(query.shape[:2], dtype=torch.float32, device=query.device), ready)


def attend_slots(
    query: Tensor,
    pool: Tensor,
    fixed: Tensor,
    seats: Tensor,
    selected: Tensor,
    scale: float,
    rest: Rest | None = None,
) -> Tensor:
    """Attention of one new token over two lists of slots, for sequences and KV heads of unequal length.

    query: bf16, fp16 or fp32 [B, H_q, d]. pool: [num_slots, 2d] of its dtype, a row is K then V. fixed: int32 [seats,
    H_kv, F], pool rows of what every step attends (sinks and window); seats: int64 [B], the seat of each lane.
    selected: int32 [B, H_kv, K], pool rows of what this step selected. -1 pads anywhere; a head with nothing but
    padding gets zeros. rest: attended too. Returns [B, H_q, d] in the query's dtype. Softmax and sums are
    float32.
    """
    slots = torch.cat([fixed[seats], selected], dim=-1)
    batch, num_kv_heads, width = slots.shape
    masked = slots < 0
    listed = slots.clamp(min=0)
    rows = pool.index_select(0, listed.flatten()).view(batch, num_kv_heads, width, pool.shape[1])
    return _attend(query, rows, masked, scale, None, rest)


def attend_blocks_naive(
    query: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    seats: Tensor,
    lengths: Tensor,
    scale: float,
    longest: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of one new token over the first `lengths` slots of each block table.

    query, pool, seats: as in `attend_slots`; the pool is cut in blocks of 64. block_tables: int64 or int32
    [seats, H_kv, M], entries beyond a head's length are not read. lengths: int64 or int32 [B, H_kv]; a length of 0
    gives zeros. longest: at least the largest of them, known to the caller. bias: float32 [seats, H_kv, >= longest],
    added to the scaled scores (log-degree), or None. Returns [B, H_q, d] in the query's dtype.
    """
    num_blocks = min(block_tables.shape[2], -(-longest // BLOCK_SIZE))
    longest = min(longest, num_blocks * BLOCK_SIZE)
    tables = block_tables[seats, :, :num_blocks]
    used = torch.arange(num_blocks, device=query.device) * BLOCK_SIZE < lengths[..., None]
    blocks = pool.view(-1, BLOCK_SIZE, pool.shape[1]).index_select(0, tables.where(used, 0).flatten())
    rows = blocks.view(*tables.shape[:2], num_blocks * BLOCK_SIZE, pool.shape[1])[:, :, :longest]
    masked = torch.arange(longest, device=query.device) >= lengths[..., None]
    return _attend(query, rows, masked, scale, None if bias is None else bias[seats, :, :longest])


def attend_blocks(
    query: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    seats: Tensor,
    lengths: Tensor,
    scale: float,
    longest: int,
    bias: Tensor | None = None,
) -> Tensor:
    """`attend_blocks_naive`: same arguments, same result within rounding. Lane by lane where all heads of each are
    equally long and nothing is added: neither a mask nor copies that are as long as the longest lane."""
    if bias is not None or not torch.equal(lengths, lengths[:, :1].expand_as(lengths)):
        return attend_blocks_naive(query, pool, block_tables, seats, lengths, scale, longest, bias)
    blocks, output = pool.view(-1, BLOCK_SIZE, pool.shape[1]), torch.zeros_like(query)
    num_kv_heads, head_dim = block_tables.shape[1], query.shape[2]
    for lane, (seat, length) in enumerate(zip(seats.tolist(), lengths[:, 0].tolist(), strict=True)):
        if not length:
            continue
        table = block_tables[seat, :, : -(-length // BLOCK_SIZE)]
        rows = blocks.index_select(0, table.flatten()).view(1, num_kv_heads, -1, pool.shape[1])[:, :, :length]
        attended = F.scaled_dot_product_attention(
            # CUDA's own kernels read whole vectors.
            query[lane].contiguous().view(1, num_kv_heads, -1, head_dim),
            rows[..., :head_dim],
            rows[..., head_dim:],
            scale=scale,
        )
        output[lane] = attended.reshape(-1, head_dim)
    return output


def _attend(
    query: Tensor,
    rows: Tensor,
    masked: Tensor,
    scale: float,
    bias: Tensor | None,
    rest: Rest | None = None,
) -> Tensor:
    batch, num_heads, head_dim = query.shape
    num_kv_heads = rows.shape[1]
    grouped = query.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim).float()
    keys, values = rows[..., :head_dim].float(), rows[..., head_dim:].float()
    scores = grouped @ keys.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias[:, :, None]
    is_masked = bool(masked.any())
    if is_masked:
        scores = scores.masked_fill(masked[:, :, None], float("-inf"))
        # A masked slot may hold anything, NaN included: 0 * NaN would reach the output.
        values = values.masked_fill(masked[..., None], 0.0)
    if rest is not None:
        rest.ready()
        scores = torch.cat([scores, rest.log_weights.view(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1)
    if is_masked:
        nothing = (scores == float("-inf")).all(dim=-1, keepdim=True)
        weights = weights.masked_fill(nothing, 0.0)
    output = weights[..., : values.shape[2]] @ values
    if rest is not None:
        output += weights[..., -1:] * rest.values.view(output.shape)
    return output.view(batch, num_heads, head_dim).to(query.dtype)
