"""RoPE in one launch: a program for some 1024 elements of a token's queries and keys; values are not touched.

The result goes to a new buffer. In place would move as many bytes, and the kernels that score and attend would first
have to copy the queries, which they need contiguous. A decode batch of 32 tokens of 40 heads is 160 programs; a prefill
chunk of 8192 tokens moves 160 MiB, bound by memory. Each element is read once: halves that rotate together are two
tiles of a program, neighbours that rotate together are split from one.
"""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


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
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference. Queries and keys come contiguous, from one buffer."""
    num_tokens, num_turned = qkv.shape[0], num_heads + num_kv_heads
    head_dim, rotary_dim = qkv.shape[1] // (num_turned + num_kv_heads), table.shape[2]
    assert qkv.stride(1) == 1, "rows are contiguous"
    assert table.is_contiguous(), "the table is contiguous"
    values = qkv[:, num_turned * head_dim :].view(num_tokens, num_kv_heads, head_dim)
    turned = torch.empty(num_tokens * num_turned * head_dim, dtype=qkv.dtype, device=qkv.device)
    num_query_elements = num_tokens * num_heads * head_dim
    queries = turned[:num_query_elements].view(num_tokens, num_heads, head_dim)
    keys = turned[num_query_elements:].view(num_tokens, num_kv_heads, head_dim)
    if num_tokens:
        heads = min(triton.next_power_of_2(num_turned), max(1, TILE // triton.next_power_of_2(head_dim)))
        _rope[(num_tokens * triton.cdiv(num_turned, heads),)](
            qkv, qkv.stride(0), table, positions, positions.stride(0), q_norm, k_norm, eps, turned, num_tokens,
            NUM_HEADS=num_heads, NUM_TURNED=num_turned, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim,
            INTERLEAVED=interleaved, HAS_NORMS=q_norm is not None, HEADS=heads,
            HALF_WIDTH=triton.next_power_of_2(rotary_dim // 2),
            REST_WIDTH=triton.next_power_of_2(max(1, head_dim - rotary_dim)), num_warps=2,
        )  # fmt: skip
    return queries, keys, values


@triton.jit(do_not_specialize=["num_tokens"])
def _rope(
    qkv, qkv_row, table, positions, position_stride, q_norm, k_norm, eps, turned, num_tokens,
    NUM_HEADS: tl.constexpr, NUM_TURNED: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORMS: tl.constexpr, HEADS: tl.constexpr, HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token. turned: all queries [T, H_q, d], then all keys [T, H_kv, d]."""
    TILES: tl.constexpr = (NUM_TURNED + HEADS - 1) // HEADS
    HAS_REST: tl.constexpr = HEAD_DIM > ROTARY_DIM
    token = (tl.program_id(0) // TILES).to(tl.int64)
    # [HEADS, 1], and so is every pointer to a row: a tile for each head of what all heads share needs no exchange
    # between threads, and its repeated reads come from the nearest cache.
    head = tl.program_id(0) % TILES * HEADS + tl.arange(0, HEADS)[:, None]
    is_head, is_query = head < NUM_TURNED, head < NUM_HEADS
    source = qkv + (token * qkv_row + head * HEAD_DIM)
    left, right = _load_pairs(source, is_head, ROTARY_DIM, HALF_WIDTH, INTERLEAVED)
    cosines = table + (tl.load(positions + token * position_stride) * (2 * ROTARY_DIM) + head * 0)
    cos_left, cos_right = _load_pairs(cosines, is_head, ROTARY_DIM, HALF_WIDTH, INTERLEAVED)
    sin_left, sin_right = _load_pairs(cosines + ROTARY_DIM, is_head, ROTARY_DIM, HALF_WIDTH, INTERLEAVED)
    first_key = tl.cast(num_tokens, tl.int64) * NUM_HEADS
    key_place = first_key + token * (NUM_TURNED - NUM_HEADS) + head - NUM_HEADS
    target = turned + tl.where(is_query, token * NUM_HEADS + head, key_place) * HEAD_DIM
    rest_dims = ROTARY_DIM + tl.arange(0, REST_WIDTH)[None, :]
    is_rest = is_head & (rest_dims < HEAD_DIM)
    if HAS_REST:
        rest = tl.load(source + rest_dims, mask=is_rest, other=0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(left * left + right * right, axis=1, keep_dims=True)
        if HAS_REST:
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        weight = tl.where(is_query, q_norm + head * 0, k_norm + head * 0)
        weight_left, weight_right = _load_pairs(weight, is_head, ROTARY_DIM, HALF_WIDTH, INTERLEAVED)
        left, right = left * scale * weight_left, right * scale * weight_right
        if HAS_REST:
            rest = rest * scale * tl.load(weight + rest_dims, mask=is_rest, other=0).to(tl.float32)
    turned_left = left * cos_left + right * sin_left
    turned_right = right * cos_right + left * sin_right
    _store_pairs(target, is_head, turned_left, turned_right, ROTARY_DIM, HALF_WIDTH, INTERLEAVED)
    if HAS_REST:
        tl.store(target + rest_dims, rest.to(turned.dtype.element_ty), mask=is_rest)


@triton.jit
def _load_pairs(
    rows, is_row, ROTARY_DIM: tl.constexpr, HALF_WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Both partners of every pair that turns together, float32 [N, HALF_WIDTH], of rows at pointers [N, 1]."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    if INTERLEAVED:
        dims = tl.arange(0, 2 * HALF_WIDTH)[None, :]
        both = tl.load(rows + dims, mask=is_row & (dims < ROTARY_DIM), other=0).to(tl.float32)
        left, right = tl.split(tl.reshape(both, (both.shape[0], HALF_WIDTH, 2)))
    else:
        dims = tl.arange(0, HALF_WIDTH)[None, :]
        is_dim = is_row & (dims < HALF)
        left = tl.load(rows + dims, mask=is_dim, other=0).to(tl.float32)
        right = tl.load(rows + HALF + dims, mask=is_dim, other=0).to(tl.float32)
    return left, right


@triton.jit
def _store_pairs(
    rows, is_row, left, right,
    ROTARY_DIM: tl.constexpr, HALF_WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROTARY_DIM // 2
    left, right = left.to(rows.dtype.element_ty), right.to(rows.dtype.element_ty)
    if INTERLEAVED:
        dims = tl.arange(0, 2 * HALF_WIDTH)[None, :]
        both = tl.reshape(tl.join(left, right), (left.shape[0], 2 * HALF_WIDTH))
        tl.store(rows + dims, both, mask=is_row & (dims < ROTARY_DIM))
    else:
        dims = tl.arange(0, HALF_WIDTH)[None, :]
        is_dim = is_row & (dims < HALF)
        tl.store(rows + dims, left, mask=is_dim)
        tl.store(rows + HALF + dims, right, mask=is_dim)
