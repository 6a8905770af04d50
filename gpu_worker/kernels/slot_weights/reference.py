"""The definition of a decode step's attention weights, in float32 PyTorch."""

from __future__ import annotations

import torch
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
    """Softmax weight of every slot, the mean over each GQA group: float32 [B, H_kv, longest].

    Arguments are those of `attend_blocks`. Slots from a head's length on weigh 0, also where its length is 0.
    """
    batch, num_heads, head_dim = query.shape
    num_kv_heads = block_tables.shape[1]
    every = torch.arange(longest, device=query.device)
    is_there = every < lengths[..., None]
    # `longest` may be rounded up beyond what a table has.
    blocks = block_tables[seats][..., (every // BLOCK_SIZE).clamp(max=block_tables.shape[2] - 1)].long()
    slots = (blocks * BLOCK_SIZE + every % BLOCK_SIZE).where(is_there, 0)
    keys = pool[:, :head_dim].index_select(0, slots.flatten()).view(batch, num_kv_heads, longest, head_dim)
    # An empty slot may hold anything, NaN included.
    keys = keys.float().masked_fill(~is_there[..., None], 0.0)
    grouped = query.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim).float()
    scores = (grouped @ keys.transpose(-1, -2) * scale).masked_fill(~is_there[:, :, None], float("-inf"))
    return scores.softmax(dim=-1).nan_to_num(0.0).mean(dim=2)
