"""The stand-in for unselected candidates, in Triton: one launch, a program for each (lane, KV head).

It reads no more than 512 codes and scales of a head, the head's covariances, 2 d d bytes, and the selected positions.
A processor of an H200 has registers and shared memory for two programs with heads of 128.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.attention import Rest
from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.kernels.attention.programs import dot
from gpu_worker.policies.bitkeys.bit_rest import reference
from gpu_worker.policies.bitkeys.bit_rest.reference import NUM_SAMPLES
from gpu_worker.policies.bitkeys.key_bits.reference import CODE_CENTRE as CENTRE

# Selected positions that are looked at at a time.
TILE = 2048
NUM_WARPS = 8
# Quarters of rotation and covariances that are under way at a time, and one; of wide heads shared memory holds fewer.
STAGES, WIDE_STAGES, WIDE = 4, 2, 128
CODE_CENTRE = tl.constexpr(CENTRE)
LEAST_VARIANCE = tl.constexpr(reference.LEAST_VARIANCE)
LOG_2 = tl.constexpr(math.log(2))


def bit_rest(
    query: Tensor,
    rotation: Tensor,
    codes: Tensor,
    scales: Tensor,
    means: Tensor,
    value_means: Tensor,
    slopes: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    selected: Tensor,
    scale: float,
    rest: Rest | None = None,
) -> Rest:
    """See the reference. All on one CUDA device; what seats have may be views of one layer."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads, num_bytes = codes.shape[1], codes.shape[3]
    group = num_heads // num_kv_heads
    rest = rest or Rest.room(query)
    if batch == 0:
        return rest
    # Bytes one by one would take a register each.
    words = codes.view(torch.int32) if num_bytes % 4 == 0 else codes
    sum_up_rest[(batch * num_kv_heads,)](
        query.contiguous(), rotation, words, scales, means, value_means, slopes, seats.contiguous(),
        begin.contiguous(), end.contiguous(), selected.contiguous(), rest.values, rest.log_weights,
        num_kv_heads, selected.shape[2], scale,
        *words.stride()[:2], *scales.stride()[:2], *means.stride()[:2], *value_means.stride()[:2],
        *slopes.stride()[:2],
        GROUP=group, WIDTH=max(8, triton.next_power_of_2(group)), HEAD_DIM=head_dim, NUM_BYTES=num_bytes,
        BYTES=max(16, triton.next_power_of_2(num_bytes)), WORD_BYTES=words.element_size(), SAMPLES=NUM_SAMPLES,
        TILE=TILE, STAGES=STAGES if head_dim <= WIDE else WIDE_STAGES, IS_PLAIN=is_interpreted(),
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return rest


@triton.jit
def _fractions(packed, shift, WORD_BYTES: tl.constexpr):
    """Decode two bits at `shift` of each byte of code words [S, W] to bfloat16 [S, W * WORD_BYTES], 1 + (code + 2) / 4.

    The bits are put behind the point, the sign of two's complement turned over: that is one operation on 16 bits,
    where converting numbers is six, and two of these slow.
    """
    words = packed.to(tl.int32) >> shift
    if WORD_BYTES == 1:
        bits = words << 5
    else:
        even, odd = tl.join(words << 5, words >> 11), tl.join(words >> 3, words >> 19)
        bits = tl.reshape(tl.join(even, odd), [packed.shape[0], packed.shape[1] * WORD_BYTES])
    return (bits & 0x60 ^ 0x3FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["seats", "begin", "end"])
def sum_up_rest(
    query, rotation, codes, scales, means, value_means, slopes, seats, begin, end, selected, values, log_weights,
    num_kv_heads, width, scale,
    code_stride_seat, code_stride_head, scale_stride_seat, scale_stride_head, mean_stride_seat, mean_stride_head,
    value_stride_seat, value_stride_head, slope_stride_seat, slope_stride_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_BYTES: tl.constexpr, BYTES: tl.constexpr,
    WORD_BYTES: tl.constexpr, SAMPLES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads, dims, byte = tl.arange(0, WIDTH), tl.arange(0, 4 * BYTES), tl.arange(0, BYTES)
    word = tl.arange(0, BYTES // WORD_BYTES)
    is_head, is_dim, is_byte = heads < GROUP, dims < HEAD_DIM, byte < NUM_BYTES
    sequence, kv_head = row // num_kv_heads, row % num_kv_heads
    seat = tl.load(seats + sequence)
    first, last = tl.load(begin + sequence), tl.load(end + sequence)
    # Heads are columns everywhere: a product of matrices takes eight of these, but sixteen rows.
    query += row * GROUP * HEAD_DIM + heads[None, :] * HEAD_DIM
    is_used = is_dim[:, None] & is_head[None, :]
    vectors = tl.load(query + dims[:, None], mask=is_used, other=0.0).to(tl.float32)
    narrow = vectors.to(tl.bfloat16)

    number = tl.maximum(last - first, 1).to(tl.int32)
    stride = tl.cdiv(number, SAMPLES)
    origin = first + stride // 2
    positions = origin + tl.arange(0, SAMPLES) * stride
    is_sampled = positions < last
    packed = tl.load(
        codes + seat * code_stride_seat + kv_head * code_stride_head
        + positions[:, None] * (NUM_BYTES // WORD_BYTES) + word[None, :],
        mask=is_sampled[:, None] & (word < NUM_BYTES // WORD_BYTES)[None, :],
        other=0,
    )  # fmt: skip
    worth = tl.load(
        scales + seat * scale_stride_seat + kv_head * scale_stride_head + positions,
        mask=is_sampled,
        other=0.0,
    ).to(tl.float32)
    means += seat * mean_stride_seat + kv_head * mean_stride_head
    mean_key = tl.load(means + dims, mask=is_dim, other=0.0)
    value_means += seat * value_stride_seat + kv_head * value_stride_head
    mean_value = tl.load(value_means + dims, mask=is_dim, other=0.0)
    # A selected position says by itself which sample it is, if any: nothing is searched.
    selected += row * width
    count = tl.zeros([SAMPLES], tl.int32)
    for start in tl.range(0, width, TILE):
        place = start + tl.arange(0, TILE)
        chosen = tl.load(selected + place, mask=place < width, other=-1)
        distance = (chosen - origin).to(tl.int32)
        sample = distance // stride
        is_one = (distance >= 0) & (sample < SAMPLES) & (sample * stride == distance)
        count += tl.histogram(sample, SAMPLES, mask=is_one)
    is_rest = is_sampled & (count == 0)

    slopes += seat * slope_stride_seat + kv_head * slope_stride_head
    products, sums = tl.zeros([SAMPLES, WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    fitted = tl.zeros([4 * BYTES, WIDTH], tl.float32)
    # A byte of a code has a coordinate of each quarter, and a quarter is a stage: read before it is waited for.
    for quarter in tl.range(0, 4, num_stages=STAGES):
        coordinate = quarter * NUM_BYTES + byte
        is_coordinate = is_byte & (coordinate < HEAD_DIM)
        at = coordinate[:, None] * HEAD_DIM + dims[None, :]
        is_read = is_coordinate[:, None] & is_dim[None, :]
        axes = tl.load(rotation + at, mask=is_read, other=0.0)
        rotated = dot(axes, narrow, IS_PLAIN).to(tl.bfloat16)
        products += dot(_fractions(packed, 2 * quarter, WORD_BYTES), rotated, IS_PLAIN)
        sums += tl.sum(rotated.to(tl.float32), axis=0)
        part = tl.load(query + coordinate[:, None], mask=is_coordinate[:, None] & is_head[None, :], other=0.0)
        of_keys = tl.load(
            slopes + coordinate[None, :] * HEAD_DIM + dims[:, None],
            mask=is_coordinate[None, :] & is_dim[:, None],
            other=0.0,
        )
        fitted += dot(of_keys, part.to(tl.bfloat16), IS_PLAIN)
    # 4 (1 + (code + 2) / 4) is code + 6.
    logits = (4 * products - (6 - CODE_CENTRE) * sums[None, :]) * (worth * scale)[:, None]

    at_mean = tl.sum(vectors * mean_key[:, None], axis=0) * scale
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

    expected = mean_value[:, None] + fitted * shift[None, :]
    target = values + (row * GROUP + heads[None, :]) * HEAD_DIM + dims[:, None]
    tl.store(target, tl.where(is_there[None, :], expected, 0.0), mask=is_used)
    per_sample = number.to(tl.float32) / num_sampled
    weight = at_mean + base + LOG_2 * tl.log2(tl.where(is_there, total * per_sample, 1.0))
    tl.store(log_weights + row * GROUP + heads, tl.where(is_there, weight, float("-inf")), mask=is_head)
