"""The definition of head norms and RoPE, in PyTorch; it is also what a CPU runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rope(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H_q, d], keys and values [T, H_kv, d]: queries and keys normed and rotated, values as they are.

    qkv: [T, (H_q + 2 H_kv) * d] with contiguous rows, heads of queries, then of keys, then of values; it is only
    read, and the values are a view of it. table: [num_positions, 2, rotary_dim] of qkv's type, contiguous, cosines
    and signed sines: element i of a head becomes `x[i] * cos[i] + x[partner of i] * sin[i]`, those from rotary_dim on
    stay. interleaved: partners are neighbours (0, 1), (2, 3), ...; else i and i + rotary_dim / 2. positions: int64
    [T], each a row of the table. q_norm, k_norm: [d], weights of the RMSNorm of each head before its rotation, both or
    none. rows: [H_kv, T, 2d], of contiguous elements, to be filled with keys and values side by side; those that are
    returned are views of them.

    In 16-bit types the kernel computes in float32 and rounds once: its result is this function's for float32 copies of
    its arguments, rounded. Here, where conversions would cost a CPU more than the rotation, each operation rounds.
    """
    num_all = num_heads + 2 * num_kv_heads
    heads = qkv.view(qkv.shape[0], num_all, qkv.shape[1] // num_all)
    query_keys, values = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        queries, keys = query_keys.split((num_heads, num_kv_heads), 1)
        queries = F.rms_norm(queries, q_norm.shape, q_norm, eps)
        keys = F.rms_norm(keys, k_norm.shape, k_norm, eps)
        query_keys = torch.cat((queries, keys), 1)
    cos, sin = table.index_select(0, positions).unsqueeze(1).unbind(2)
    turned = _turn(query_keys, cos, sin, interleaved)
    queries, keys = turned.split((num_heads, num_kv_heads), 1)
    if rows is None:
        return queries, keys, values
    of_rows = rows.transpose(0, 1).split(heads.shape[2], dim=2)
    for target, source in zip(of_rows, (keys, values), strict=True):
        target.copy_(source)
    return queries, *of_rows


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """heads [T, H, d] by cos and sin [T, 1, rotary_dim]."""
    rotary_dim = cos.shape[-1]
    rotary = heads[..., :rotary_dim]
    partner = _neighbours(rotary) if interleaved else rotary.roll(rotary_dim // 2, -1)
    turned = (rotary * cos).addcmul_(partner, sin)
    if rotary_dim == heads.shape[-1]:
        return turned
    return torch.cat((turned, heads[..., rotary_dim:]), -1)


def _neighbours(rotary: Tensor) -> Tensor:
    return rotary.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
