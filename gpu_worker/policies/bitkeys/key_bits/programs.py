"""The programs of `kernel.py`: the mean of keys, and codes of a tile of keys."""
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
# Added, it leaves a float32 of less than 2^22 no bits behind the point.
WHOLE = tl.constexpr(1.5 * 2**23)


@triton.jit(do_not_specialize=["num_tokens", "size"])
def sum_keys(
    keys, sums, num_tokens, size, key_stride_head, key_stride_token,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The sum of `size` adjacent tokens of one KV head: float32 [H_kv, splits, d]."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    keys += head * key_stride_head
    total = tl.zeros([TOKENS, DIMS], tl.float32)
    for start in range(split * size, tl.minimum((split + 1) * size, num_tokens), TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        places = tokens.to(tl.int64)[:, None] * key_stride_token + dims[None, :]
        inside = (tokens < num_tokens)[:, None] & is_dim[None, :]
        total += tl.load(keys + places, mask=inside, other=0.0).to(tl.float32)
    own = head * tl.num_programs(0) + split
    tl.store(sums + own * HEAD_DIM + dims, tl.sum(total, axis=0), mask=is_dim)


@triton.jit(do_not_specialize=["num_tokens", "splits", "num_sinks"])
def write_means(
    sums, keys, means, sinks, num_tokens, splits, num_sinks,
    key_stride_head, key_stride_token, sink_stride_head, sink_stride_token,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One KV head's mean, of its splits' sums, and its sinks less it; ROWS of both at a time."""
    head = tl.program_id(0).to(tl.int64)
    dims, row = tl.arange(0, DIMS), tl.arange(0, ROWS)
    is_dim = dims < HEAD_DIM
    total = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(0, splits, ROWS):
        split = start + row
        inside = (split < splits)[:, None] & is_dim[None, :]
        total += tl.load(
            sums + (head * splits + split)[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0
        )
    mean = tl.sum(total, axis=0) / num_tokens.to(tl.float32)
    tl.store(means + head * HEAD_DIM + dims, mean, mask=is_dim)
    keys += head * key_stride_head
    sinks += head * sink_stride_head
    for start in range(0, num_sinks, ROWS):
        sink = start + row
        inside = (sink < num_sinks)[:, None] & is_dim[None, :]
        key = tl.load(keys + sink[:, None] * key_stride_token + dims[None, :], mask=inside, other=0.0)
        target = sinks + sink[:, None] * sink_stride_token + dims[None, :]
        tl.store(target, key.to(tl.float32) - mean[None, :], mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "size"])
def code_tokens(
    keys, means, rotation, codes, scales, num_tokens, size,
    key_stride_head, key_stride_token, code_stride_head, code_stride_token, scale_stride_head,
    HEAD_DIM: tl.constexpr, NUM_BYTES: tl.constexpr, DIMS: tl.constexpr, BYTES: tl.constexpr, TOKENS: tl.constexpr,
    IS_HELD: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Codes of `size` adjacent tokens of one KV head, TOKENS at a time. IS_HELD: shared memory has room for the
    rotation, which is read once, and for keys that are on their way."""
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    mean = tl.load(means + head * HEAD_DIM + dims, mask=is_dim, other=0.0)
    if IS_HELD:
        held = (
            load_axes(rotation, 0, HEAD_DIM, NUM_BYTES, DIMS, BYTES),
            load_axes(rotation, 1, HEAD_DIM, NUM_BYTES, DIMS, BYTES),
            load_axes(rotation, 2, HEAD_DIM, NUM_BYTES, DIMS, BYTES),
            load_axes(rotation, 3, HEAD_DIM, NUM_BYTES, DIMS, BYTES),
        )
    else:
        held = rotation
    keys += head * key_stride_head
    codes += head * code_stride_head
    scales += head * scale_stride_head
    first = tl.program_id(0) * size
    for start in tl.range(
        first, tl.minimum(first + size, num_tokens), TOKENS, num_stages=3 if IS_HELD else 1
    ):
        tokens = (start + tl.arange(0, TOKENS)).to(tl.int64)
        is_token = tokens < num_tokens
        places = tokens[:, None] * key_stride_token + dims[None, :]
        vectors = tl.load(keys + places, mask=is_token[:, None] & is_dim[None, :], other=0.0).to(tl.float32)
        _write_codes(
            vectors - mean[None, :], held, codes + tokens * code_stride_token, scales + tokens, is_token,
            HEAD_DIM, NUM_BYTES, DIMS, BYTES, IS_HELD, IS_PLAIN,
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
        vectors, rotation, targets, scales + worths, is_token,
        HEAD_DIM, NUM_BYTES, DIMS, BYTES, False, IS_PLAIN,
    )  # fmt: skip


@triton.jit
def load_axes(
    rotation, QUARTER: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_BYTES: tl.constexpr, DIMS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """The rows of the rotation that give one quarter of the coordinates, as columns: [DIMS, BYTES]."""
    dims, byte = tl.arange(0, DIMS), tl.arange(0, BYTES)
    coordinate = QUARTER * NUM_BYTES + byte
    is_coordinate = (byte < NUM_BYTES) & (coordinate < HEAD_DIM)
    return tl.load(
        rotation + coordinate[None, :] * HEAD_DIM + dims[:, None],
        mask=is_coordinate[None, :] & (dims < HEAD_DIM)[:, None],
        other=0.0,
    )


@triton.jit
def _write_codes(
    vectors, rotation, targets, worths, is_token,
    HEAD_DIM: tl.constexpr, NUM_BYTES: tl.constexpr, DIMS: tl.constexpr, BYTES: tl.constexpr,
    IS_HELD: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Codes and scales of centred keys [TOKENS, DIMS], written to where `targets` and `worths` [TOKENS] point.

    rotation: a pointer to it; or, held, its axes in four quarters.
    """
    narrow = vectors.to(tl.bfloat16)
    square = tl.sum(vectors * vectors, axis=1)
    per_step = tl.where(square > 0, 1.0 / (STEP * tl.sqrt(tl.maximum(square, TINY) / HEAD_DIM)), 0.0)
    packed = tl.zeros([vectors.shape[0], BYTES], tl.int32)
    product = tl.zeros_like(square)
    for quarter in tl.static_range(4):
        axes = (
            rotation[quarter] if IS_HELD else load_axes(rotation, quarter, HEAD_DIM, NUM_BYTES, DIMS, BYTES)
        )
        bits, more = _quarter(narrow, axes, per_step, quarter, HEAD_DIM, NUM_BYTES, BYTES, IS_PLAIN)
        packed |= bits << (2 * quarter)
        product += more
    byte = tl.arange(0, BYTES)
    is_written = is_token[:, None] & (byte < NUM_BYTES)[None, :]
    tl.store(targets[:, None] + byte[None, :], packed.to(tl.uint8), mask=is_written)
    worth = tl.where(product > 0, square / tl.maximum(product, TINY), 0.0)
    tl.store(worths, tl.minimum(worth, LARGEST_SCALE).to(tl.float16), mask=is_token)


@triton.jit
def _quarter(
    narrow, axes, per_step, QUARTER: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_BYTES: tl.constexpr, BYTES: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Codes of one quarter of the coordinates, int32 [TOKENS, BYTES] of two bits, and the products of their values with
    the coordinates, summed up: [TOKENS].

    floor(x) is round(x - 0.5), and WHOLE rounds: a value on a border may get its lower code. Converting numbers would
    take longer.
    """
    byte = tl.arange(0, BYTES)
    is_coordinate = (byte < NUM_BYTES) & (QUARTER * NUM_BYTES + byte < HEAD_DIM)
    rotated = dot(narrow, axes, IS_PLAIN)
    shifted = tl.minimum(tl.maximum(rotated * per_step[:, None] - 0.5, -2.0), 1.0) + WHOLE
    product = tl.sum(rotated * ((shifted - WHOLE) + CODE_CENTRE), axis=1)
    return tl.where(is_coordinate[None, :], shifted.to(tl.int32, bitcast=True) & 3, 0), product
