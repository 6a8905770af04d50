"""The program of `kernel.py`: one head's unselected candidates, by a sample of them."""
# mypy: allow-untyped-defs

from __future__ import annotations

import math

import triton
import triton.language as tl

from gpu_worker.kernels.attention.programs import dot
from gpu_worker.policies.bitkeys.bit_rest import reference
from gpu_worker.policies.bitkeys.key_bits.reference import CODE_CENTRE as CENTRE

CODE_CENTRE = tl.constexpr(CENTRE)
LEAST_VARIANCE = tl.constexpr(reference.LEAST_VARIANCE)
LOG_2 = tl.constexpr(math.log(2))
FAR = tl.constexpr(1 << 62)


@triton.jit
def _are_selected(selected, positions, width, num_bits):
    """Which positions are among `width` ascending ones, of which -1 pads the end."""
    rank = tl.zeros(positions.shape, tl.int32)
    for bit in range(0, num_bits):
        probe = rank + (1 << (num_bits - 1 - bit))
        found = tl.load(selected + probe - 1, mask=probe <= width, other=-1)
        found = tl.where(found < 0, FAR, found)
        rank = tl.where(found <= positions, probe, rank)
    return (rank > 0) & (tl.load(selected + rank - 1, mask=rank > 0, other=-1) == positions)


@triton.jit(do_not_specialize=["width", "num_bits"], do_not_specialize_on_alignment=["seats", "begin", "end"])
def sum_up_rest(
    query, rotation, codes, scales, means, value_means, slopes, seats, begin, end, selected, values, log_weights,
    num_kv_heads, width, num_bits, scale,
    code_stride_seat, code_stride_head, scale_stride_seat, scale_stride_head, mean_stride_seat, mean_stride_head,
    value_stride_seat, value_stride_head, slope_stride_seat, slope_stride_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
    NUM_BYTES: tl.constexpr, BYTES: tl.constexpr, SAMPLES: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sequence, kv_head = row // num_kv_heads, row % num_kv_heads
    seat = tl.load(seats + sequence)
    first, last = tl.load(begin + sequence), tl.load(end + sequence)
    heads, dims, byte = tl.arange(0, WIDTH), tl.arange(0, DIMS), tl.arange(0, BYTES)
    is_head, is_dim = heads < GROUP, dims < HEAD_DIM
    number = tl.maximum(last - first, 1)
    stride = tl.cdiv(number, SAMPLES)
    positions = first + stride // 2 + tl.arange(0, SAMPLES) * stride
    is_sampled = positions < last
    packed = tl.load(
        codes + seat * code_stride_seat + kv_head * code_stride_head
        + positions[:, None] * NUM_BYTES + byte[None, :],
        mask=is_sampled[:, None] & (byte < NUM_BYTES)[None, :],
        other=0,
    ).to(tl.int32)  # fmt: skip
    worth = tl.load(
        scales + seat * scale_stride_seat + kv_head * scale_stride_head + positions,
        mask=is_sampled,
        other=0.0,
    ).to(tl.float32)

    query += row * GROUP * HEAD_DIM + heads[:, None] * HEAD_DIM
    is_used = is_head[:, None] & is_dim[None, :]
    vectors = tl.load(query + dims[None, :], mask=is_used, other=0.0).to(tl.float32)
    narrow = vectors.to(tl.bfloat16)
    products = tl.zeros([SAMPLES, WIDTH], tl.float32)
    for quarter in tl.static_range(4):
        coordinate = quarter * NUM_BYTES + byte
        is_coordinate = (byte < NUM_BYTES) & (coordinate < HEAD_DIM)
        axes = tl.load(
            rotation + coordinate[None, :] * HEAD_DIM + dims[:, None],
            mask=is_coordinate[None, :] & is_dim[:, None],
            other=0.0,
        )
        rotated = dot(narrow, axes, IS_PLAIN)
        # Two bits of two's complement.
        code = ((packed >> (2 * quarter)) & 3 ^ 2) - 2
        spread = (code.to(tl.float32) + CODE_CENTRE).to(tl.bfloat16)
        products += dot(spread, tl.trans(rotated.to(tl.bfloat16)), IS_PLAIN)
    logits = products * (worth * scale)[:, None]

    is_rest = is_sampled & (_are_selected(selected + row * width, positions, width, num_bits) == 0)
    top = tl.max(tl.where(is_rest[:, None], logits, float("-inf")), axis=0)
    base = tl.where(top > float("-inf"), top, 0.0)
    weights = tl.where(is_rest[:, None], tl.exp(logits - base[None, :]), 0.0)
    total = tl.sum(weights, axis=0)
    num_sampled = tl.maximum(tl.sum(is_sampled.to(tl.int32), axis=0), 1).to(tl.float32)
    mean = tl.sum(logits, axis=0) / num_sampled
    distance = tl.where(is_sampled[:, None], logits - mean[None, :], 0.0)
    variance = tl.sum(distance * distance, axis=0) / num_sampled
    is_there = total > 0
    shift = tl.sum(weights * distance, axis=0) / tl.where(is_there, total, 1.0)
    shift = tl.minimum(tl.maximum(shift / tl.maximum(variance, LEAST_VARIANCE), -1.0), 1.0) * scale

    slopes += seat * slope_stride_seat + kv_head * slope_stride_head
    fitted = tl.zeros([WIDTH, DIMS], tl.float32)
    for start in tl.static_range(0, DIMS, ROWS):
        some = start + tl.arange(0, ROWS)
        part = tl.load(query + some[None, :], mask=is_head[:, None] & (some < HEAD_DIM)[None, :], other=0.0)
        of_keys = tl.load(
            slopes + some[:, None] * HEAD_DIM + dims[None, :],
            mask=(some < HEAD_DIM)[:, None] & is_dim[None, :],
            other=0.0,
        )
        fitted += dot(part.to(tl.bfloat16), of_keys, IS_PLAIN)
    value_means += seat * value_stride_seat + kv_head * value_stride_head
    expected = tl.load(value_means + dims, mask=is_dim, other=0.0)[None, :] + fitted * shift[:, None]
    target = values + (row * GROUP + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(target, tl.where(is_there[:, None], expected, 0.0), mask=is_used)

    mean_key = tl.load(
        means + seat * mean_stride_seat + kv_head * mean_stride_head + dims, mask=is_dim, other=0.0
    )
    at_mean = tl.sum(vectors * mean_key[None, :], axis=1) * scale
    per_sample = number.to(tl.float32) / num_sampled
    weight = at_mean + base + LOG_2 * tl.log2(tl.where(is_there, total * per_sample, 1.0))
    tl.store(log_weights + row * GROUP + heads, tl.where(is_there, weight, float("-inf")), mask=is_head)
