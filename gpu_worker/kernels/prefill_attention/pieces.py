"""Prefill attention by plain matrix products in float32, a few queries at a time, so that the scores of a long prompt
never exceed a given number of elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

# 512 MiB of float32.
MAX_SCORES = 1 << 27


def attend_in_pieces(query: Tensor, rows: Tensor, begin: int, scale: float, max_scores: int) -> Tensor:
    """As `attend_chunk`, in float32, with at most `max_scores` scores at a time (more for a single query)."""
    num_tokens, num_heads, _head_dim = query.shape
    output = torch.empty_like(query)
    piece = max(1, max_scores // (num_heads * (begin + num_tokens)))
    for first in range(0, num_tokens, piece):
        part = query[first : first + piece]
        output[first : first + piece] = _attend(part, rows, begin + first, scale)
    return output


def _attend(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, end = rows.shape[0], begin + num_tokens
    # A group's heads are more queries of the same keys: no key is copied for each of them.
    grouped = query.float().view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys, values = rows[:, :end, :head_dim].float(), rows[:, :end, head_dim:].float()
    scores = grouped.reshape(num_kv_heads, -1, head_dim) @ keys.transpose(1, 2)
    positions = torch.arange(end, device=query.device)
    future = positions > positions[begin:, None]
    scores.mul_(scale).view(num_kv_heads, -1, num_tokens, end).masked_fill_(future, float("-inf"))
    output = (scores.softmax(dim=-1) @ values).view(num_kv_heads, -1, num_tokens, head_dim)
    return output.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)
