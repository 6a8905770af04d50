"""The programs of `kernel.py`: codes of a tile of keys."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.attention.programs import dot
from gpu_worker.policies.bitkeys.key_bits import reference

STEP = tl.constexpr(reference.STEP)
CODE_CENTRE = tl.constexpr(reference.CODE_CENTRE)
LARGEST_SCALE = tl.constexpr(reference.LARGEST_SCALE)
# Below any square that counts.
TINY = tl.constexpr(1e-30)


@triton.jit(do_not_specialize=["num_tokens"])
def code_tokens(
    keys, means, rotation, codes, scales, num_tokens,
    key_stride_head, key_stride_token, code_stride_head, code_stride_token, scale_stride_head,
    HEAD_DIM: tl.constexpr, NUM_BYTES: tl.constexpr, DIMS: tl.constexpr, BYTES: tl.constexpr, TOKENS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Codes of TOKENS adjacent tokens of one KV head."""
    head = tl.program_id(1).to(tl.int64)
    tokens, dims = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIMS)
    is_token, is_dim = tokens < num_tokens, dims < HEAD_DIM
    places = head * key_stride_head + tokens[:, None] * key_stride_token + dims[None, :]
    vectors = tl.load(keys + places, mask=is_token[:, None] & is_dim[None, :], other=0.0).to(tl.float32)
    mean = tl.load(means + head * HEAD_DIM + dims, mask=is_dim, other=0.0)
    targets = codes + head * code_stride_head + tokens * code_stride_token
    _write_codes(
        vectors - mean[None, :], rotation, targets, scales + head * scale_stride_head + tokens, is_token,
        HEAD_DIM, NUM_BYTES, DIMS, BYTES, IS_PLAIN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seats", "positions"])
def code_vectors(
    keys, means, rotation, codes, scales, seats, positions, num_rows, num_layers, num_kv_heads,
    key_stride_row, key_stride_layer, key_stride_head, mean_stride_seat, mean_stride_layer, mean_stride_head,
    code_stride_seat, code_stride_layer, code_stride_head, code_stride_token,
    scale_stride_seat, scale_stride_layer, scale_stride_head,
    HEAD_DIM: tl.constexpr, NUM_BYTES: tl.constexpr, DIMS: tl.constexpr, BYTES: tl.constexpr, TOKENS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Codes of TOKENS (lane, layer, KV head), each with a mean and a place of its own."""
    rows, dims = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIMS)
    is_row = rows < num_rows
    head = (rows % num_kv_heads).to(tl.int64)
    layer = (rows // num_kv_heads % num_layers).to(tl.int64)
    lane = (rows // num_kv_heads // num_layers).to(tl.int64)
    position = tl.load(positions + lane, mask=is_row, other=-1)
    is_token = position >= 0
    seat = tl.load(seats + lane, mask=is_token, other=0)
    is_used = is_token[:, None] & (dims < HEAD_DIM)[None, :]
    sources = lane * key_stride_row + layer * key_stride_layer + head * key_stride_head
    vectors = tl.load(keys + sources[:, None] + dims[None, :], mask=is_used, other=0.0).to(tl.float32)
    sources = seat * mean_stride_seat + layer * mean_stride_layer + head * mean_stride_head
    vectors -= tl.load(means + sources[:, None] + dims[None, :], mask=is_used, other=0.0)
    targets = seat * code_stride_seat + layer * code_stride_layer + head * code_stride_head
    targets = codes + targets + position * code_stride_token
    worths = seat * scale_stride_seat + layer * scale_stride_layer + head * scale_stride_head + position
    _write_codes(
        vectors, rotation, targets, scales + worths, is_token, HEAD_DIM, NUM_BYTES, DIMS, BYTES, IS_PLAIN
    )  # fmt: skip


@triton.jit
def _write_codes(
    vectors, rotation, targets, worths, is_token,
    HEAD_DIM: tl.constexpr, NUM_BYTES: tl.constexpr, DIMS: tl.constexpr, BYTES: tl.constexpr,
    IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Codes and scales of centred keys [TOKENS, DIMS], written to where `targets` and `worths` [TOKENS] point."""
    dims, byte = tl.arange(0, DIMS), tl.arange(0, BYTES)
    narrow = vectors.to(tl.bfloat16)
    square = tl.sum(vectors * vectors, axis=1)
    per_step = tl.where(square > 0, 1.0 / (STEP * tl.sqrt(tl.maximum(square, TINY) / HEAD_DIM)), 0.0)
    product = tl.zeros_like(square)
    packed = tl.zeros([vectors.shape[0], BYTES], tl.int32)
    for quarter in tl.static_range(4):
        coordinate = quarter * NUM_BYTES + byte
        is_coordinate = (byte < NUM_BYTES) & (coordinate < HEAD_DIM)
        # Columns are the matrix's rows.
        axes = tl.load(
            rotation + coordinate[None, :] * HEAD_DIM + dims[:, None],
            mask=is_coordinate[None, :] & (dims < HEAD_DIM)[:, None],
            other=0.0,
        )
        rotated = dot(narrow, axes, IS_PLAIN)
        code = tl.minimum(tl.maximum(tl.floor(rotated * per_step[:, None]), -2.0), 1.0)
        product += tl.sum(rotated * (code + CODE_CENTRE), axis=1)
        packed |= tl.where(is_coordinate[None, :], code.to(tl.int32) & 3, 0) << (2 * quarter)
    is_written = is_token[:, None] & (byte < NUM_BYTES)[None, :]
    tl.store(targets[:, None] + byte[None, :], packed.to(tl.uint8), mask=is_written)
    worth = tl.where(product > 0, square / tl.maximum(product, TINY), 0.0)
    tl.store(worths, tl.minimum(worth, LARGEST_SCALE).to(tl.float16), mask=is_token)
