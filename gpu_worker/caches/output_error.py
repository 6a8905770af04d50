"""How far a head's attention output is from that over every token."""

from __future__ import annotations

import torch
from torch import Tensor


def output_errors(query: Tensor, rows: Tensor, output: Tensor, scale: float) -> Tensor:
    """|output - exact| / |exact| of every query head, by L2: float32 [L, H_q].

    query, output: [L, H_q, d]. rows: keys and values of all tokens, the new one included, [L, H_kv, n, 2d].
    """
    num_layers, num_heads, head_dim = query.shape
    keys, values = rows.float().split(head_dim, dim=-1)
    grouped = query.float().view(num_layers, rows.shape[1], -1, head_dim)
    weights = (grouped @ keys.transpose(-1, -2) * scale).softmax(dim=-1)
    exact = (weights @ values).view(num_layers, num_heads, head_dim)
    tiny = torch.finfo(exact.dtype).tiny
    return (output.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=tiny)
