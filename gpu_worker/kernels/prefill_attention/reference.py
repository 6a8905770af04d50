"""Chunked causal attention: the plain definition, and the same through PyTorch's fused attention on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_chunk_naive(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    """Exact causal attention of the tokens at `begin`, `begin` + 1, ...: the definition.

    query: [T, H_q, d]. rows: [H_kv, >= begin + T, 2d], K then V, of which the first begin + T tokens are read.
    Returns [T, H_q, d] in the query's dtype, computed in float32.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, end = rows.shape[0], begin + num_tokens
    grouped = query.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).float()
    keys, values = rows[:, None, :end, :head_dim].float(), rows[:, None, :end, head_dim:].float()
    scores = grouped @ keys.transpose(-1, -2) * scale
    positions = torch.arange(end, device=query.device)
    future = positions[None, :] > positions[begin:, None]
    output = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ values
    return output.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim).to(query.dtype)


def attend_chunk(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    """`attend_chunk_naive` through PyTorch's fused attention: same arguments, same result within rounding."""
    num_tokens, _num_heads, head_dim = query.shape
    grouped = query.transpose(0, 1)[None]
    end = begin + num_tokens
    keys, values = rows[None, :, :end, :head_dim], rows[None, :, :end, head_dim:]
    if begin == 0 or num_tokens == 1:
        output = F.scaled_dot_product_attention(
            grouped, keys, values, is_causal=begin == 0, scale=scale, enable_gqa=True
        )
    else:
        output = _past_and_chunk(grouped, keys, values, begin, scale)
    return output[0].transpose(0, 1)


def _past_and_chunk(query: Tensor, keys: Tensor, values: Tensor, begin: int, scale: float) -> Tensor:
    """Two unmasked calls instead of one masked: a mask costs the CPU kernel twice the time of the past itself."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    group = query.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    past, past_lse = fused(query, keys[:, :, :begin], values[:, :, :begin], scale=scale)
    chunk, chunk_lse = fused(query, keys[:, :, begin:], values[:, :, begin:], is_causal=True, scale=scale)
    share = torch.sigmoid(past_lse - chunk_lse)[..., None].to(past.dtype)
    return past * share + chunk * (1 - share)
