"""RoPE in one launch: a program for some 1024 elements of a token's queries and keys; values are not touched, or passed
on to where rows are wanted.

The result goes to a new buffer, but for keys that are wanted in rows. In place would move as many bytes, and the
kernels that score and attend would first have to copy the queries, which they need contiguous. A decode batch of 32
tokens of 40 heads is 160 programs; a prefill chunk of 8192 tokens moves 160 MiB, bound by memory. Each element is read
once: halves that rotate together are two tiles of a program, neighbours that rotate together are split from one.
"""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

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
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference. Queries come contiguous, and so do keys where there are no rows."""
    num_tokens, num_turned = qkv.shape[0], num_heads + num_kv_heads
    num_all, rotary_dim = num_turned + num_kv_heads, table.shape[2]
    head_dim = qkv.shape[1] // num_all
    assert qkv.stride(1) == 1, "rows are contiguous"
    assert table.is_contiguous(), "the table is contiguous"
    queries = qkv.new_empty(num_tokens, num_heads, head_dim)
    if rows is None:
        keys = qkv.new_empty(num_tokens, num_kv_heads, head_dim)
        values = qkv[:, num_turned * head_dim :].view(num_tokens, num_kv_heads, head_dim)
    else:
        assert rows.stride(2) == 1, "the elements of a row lie side by side"
        keys, values = rows.transpose(0, 1).split(head_dim, dim=2)
    if num_tokens:
        # Values are only passed on where there are rows for them.
        num_read = num_turned if rows is None else num_all
        heads = min(triton.next_power_of_2(num_read), max(1, TILE // triton.next_power_of_2(head_dim)))
        _rope[(num_tokens * triton.cdiv(num_read, heads),)](
            qkv, qkv.stride(0), table, positions, positions.stride(0), q_norm, k_norm, eps, queries, keys,
            *keys.stride()[:2],
            NUM_HEADS=num_heads, NUM_TURNED=num_turned, NUM_READ=num_read, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim,
            INTERLEAVED=interleaved, HAS_NORMS=q_norm is not None, HEADS=heads,
            HALF_WIDTH=triton.next_power_of_2(rotary_dim // 2),
            REST_WIDTH=triton.next_power_of_2(max(1, head_dim - rotary_dim)), num_warps=2,
        )  # fmt: skip
    return queries, keys, values


@triton.jit
def _rope(
    qkv, qkv_row, table, positions, position_stride, q_norm, k_norm, eps, queries, keys, key_token, key_head,
    NUM_HEADS: tl.constexpr, NUM_TURNED: tl.constexpr, NUM_READ: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORMS: tl.constexpr, HEADS: tl.constexpr,
    HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token. queries: [T, H_q, d]. keys: [T, H_kv, d] with these steps between tokens and heads; of
    NUM_READ heads those above NUM_TURNED are values, which go behind their keys."""
    TILES: tl.constexpr = (NUM_READ + HEADS - 1) // HEADS
    HAS_REST: tl.constexpr = HEAD_DIM > ROTARY_DIM
    HAS_VALUES: tl.constexpr = NUM_READ > NUM_TURNED
    token = (tl.program_id(0) // TILES).to(tl.int64)
    # [HEADS, 1], and so is every pointer to a row: a tile for each head of what all heads share needs no exchange
    # between threads, and its repeated reads come from the nearest cache.
    head = tl.program_id(0) % TILES * HEADS + tl.arange(0, HEADS)[:, None]
    is_head, is_query, is_value = head < NUM_READ, head < NUM_HEADS, head >= NUM_TURNED
    source = qkv + (token * qkv_row + head * HEAD_DIM)
    left, right = _load_pairs(source, is_head, ROTARY_DIM, HALF_WIDTH, INTERLEAVED)
    cosines = table + (tl.load(positions + token * position_stride) * (2 * ROTARY_DIM) + head * 0)
    cos_left, cos_right = _load_pairs(cosines, is_head, ROTARY_DIM, HALF_WIDTH, INTERLEAVED)
    sin_left, sin_right = _load_pairs(cosines + ROTARY_DIM, is_head, ROTARY_DIM, HALF_WIDTH, INTERLEAVED)
    if HAS_VALUES:
        kv_head = tl.where(is_value, head - NUM_TURNED, head - NUM_HEADS)
        at_key = keys + (token * key_token + kv_head * key_head + tl.where(is_value, HEAD_DIM, 0))
    else:
        at_key = keys + (token * key_token + (head - NUM_HEADS) * key_head)
    target = tl.where(is_query, queries + (token * NUM_HEADS + head) * HEAD_DIM, at_key)
    rest_dims = ROTARY_DIM + tl.arange(0, REST_WIDTH)[None, :]
    is_rest = is_head & (rest_dims < HEAD_DIM)
    if HAS_REST:
        rest = tl.load(source + rest_dims, mask=is_rest, other=0).to(tl.float32)
    # Values stay as they are.
    plain_left, plain_right = left, right
    if HAS_NORMS:
        squares = tl.sum(left * left + right * right, axis=1, keep_dims=True)
        if HAS_REST:
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        weight = tl.where(is_query, q_norm + head * 0, k_norm + head * 0)
        weight_left, weight_right = _load_pairs(weight, is_head, ROTARY_DIM, HALF_WIDTH, INTERLEAVED)
        left, right = left * scale * weight_left, right * scale * weight_right
        if HAS_REST:
            normed = rest * scale * tl.load(weight + rest_dims, mask=is_rest, other=0).to(tl.float32)
            rest = tl.where(is_value, rest, normed) if HAS_VALUES else normed
    turned_left = left * cos_left + right * sin_left
    turned_right = right * cos_right + left * sin_right
    if HAS_VALUES:
        turned_left = tl.where(is_value, plain_left, turned_left)
        turned_right = tl.where(is_value, plain_right, turned_right)
    _store_pairs(target, is_head, turned_left, turned_right, ROTARY_DIM, HALF_WIDTH, INTERLEAVED)
    if HAS_REST:
        tl.store(target + rest_dims, rest.to(queries.dtype.element_ty), mask=is_rest)


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
