"""The programs of `kernel.py`: rounded queries with the totals of their heads, and weights from codes."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.attention.programs import dot
from gpu_worker.policies.bitkeys.bit_score import reference
from gpu_worker.policies.bitkeys.key_bits.programs import load_axes
from gpu_worker.policies.bitkeys.key_bits.reference import CODE_CENTRE as CENTRE

LARGEST = tl.constexpr(reference.LARGEST)
CODE_CENTRE = tl.constexpr(CENTRE)
LEVEL_SHIFT = tl.constexpr(reference.LEVEL_SHIFT)
MIN_LEVEL = tl.constexpr(reference.MIN_LEVEL)
MAX_LEVEL = tl.constexpr(reference.MAX_LEVEL)
# What a code of 1 is in a byte that is not shifted to the right.
CODE_UNIT = tl.constexpr(64)
# Below what a query or a total can be.
TINY = tl.constexpr(1e-30)
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _two_bits(packed, QUARTER: tl.constexpr, IS_PLAIN: tl.constexpr):
    """The codes of one quarter of the coordinates, 64-fold, int8 of the shape of their bytes: four at a time. (A shift
    to the left may be a multiplication, which does not wait for the masks' pipe.)"""
    if IS_PLAIN:
        return (packed << (6 - 2 * QUARTER)) & -64
    elif QUARTER == 0:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; shl.b32 t, $1, 6; and.b32 $0, t, 0xC0C0C0C0;}",
            "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    elif QUARTER == 1:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xC0C0C0C0;}",
            "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    elif QUARTER == 2:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; shl.b32 t, $1, 2; and.b32 $0, t, 0xC0C0C0C0;}",
            "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xC0C0C0C0;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )


@triton.jit
def _rounded(rotated, per_unit):
    return tl.floor(rotated * per_unit[:, None] + 0.5).to(tl.int8)


@triton.jit
def _store_quarter(
    rounded, target, is_head, QUARTER: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_BYTES: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    byte = tl.arange(0, BYTES)
    coordinate = QUARTER * NUM_BYTES + byte
    is_coordinate = (byte < NUM_BYTES) & (coordinate < HEAD_DIM)
    tl.store(target[:, None] + coordinate[None, :], rounded, mask=is_head[:, None] & is_coordinate[None, :])


@triton.jit(do_not_specialize=["num_positions"], do_not_specialize_on_alignment=["seats", "begin", "end"])
def round_queries(
    query, rotation, codes, scales, sinks, seats, begin, end, rounded, worths,
    num_kv_heads, num_positions, num_sinks, scale,
    code_stride_seat, code_stride_head, scale_stride_seat, scale_stride_head,
    sink_stride_seat, sink_stride_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    NUM_BYTES: tl.constexpr, BYTES: tl.constexpr, SINKS: tl.constexpr, SAMPLES: tl.constexpr,
    SHARES: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """One head's rounded queries, and its share of their totals in base 2: of the sinks, and of a share of the samples.

    All programs of a head round its queries, which takes no longer than that one does; the first writes them.
    """
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, kv_head = row // num_kv_heads, row % num_kv_heads
    seat = tl.load(seats + sequence)
    first = tl.load(begin + sequence).to(tl.int32)
    last = tl.minimum(tl.load(end + sequence), num_positions).to(tl.int32)
    heads, dims = tl.arange(0, WIDTH), tl.arange(0, DIMS)
    is_head = heads < GROUP

    # All is on its way before the first is waited for.
    axes0 = load_axes(rotation, 0, HEAD_DIM, NUM_BYTES, DIMS, BYTES)
    axes1 = load_axes(rotation, 1, HEAD_DIM, NUM_BYTES, DIMS, BYTES)
    axes2 = load_axes(rotation, 2, HEAD_DIM, NUM_BYTES, DIMS, BYTES)
    axes3 = load_axes(rotation, 3, HEAD_DIM, NUM_BYTES, DIMS, BYTES)
    number = tl.maximum(last - first, 1)
    stride = tl.cdiv(number, SAMPLES * SHARES)
    byte = tl.arange(0, BYTES)
    positions = first + stride // 2 + (share * SAMPLES + tl.arange(0, SAMPLES)) * stride
    is_sampled = positions < last
    num_sampled = tl.cdiv(tl.maximum(last - first - stride // 2, 0), stride)
    codes += seat * code_stride_seat + kv_head * code_stride_head
    packed = tl.load(
        codes + positions.to(tl.int64)[:, None] * NUM_BYTES + byte[None, :],
        mask=is_sampled[:, None] & (byte < NUM_BYTES)[None, :],
        other=0,
    ).to(tl.int8, bitcast=True)
    scales += seat * scale_stride_seat + kv_head * scale_stride_head
    worth = tl.load(scales + positions, mask=is_sampled, other=0.0).to(tl.float32)

    query += (row * GROUP + heads[:, None]) * HEAD_DIM + dims[None, :]
    is_used = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    vectors = tl.load(query, mask=is_used, other=0.0).to(tl.float32)
    narrow = vectors.to(tl.bfloat16)
    quarter0 = dot(narrow, axes0, IS_PLAIN)
    quarter1 = dot(narrow, axes1, IS_PLAIN)
    quarter2 = dot(narrow, axes2, IS_PLAIN)
    quarter3 = dot(narrow, axes3, IS_PLAIN)
    largest = tl.maximum(tl.max(tl.abs(quarter0), axis=1), tl.max(tl.abs(quarter1), axis=1))
    largest = tl.maximum(largest, tl.max(tl.abs(quarter2), axis=1))
    largest = tl.maximum(largest, tl.max(tl.abs(quarter3), axis=1))
    unit = largest / LARGEST * scale / CODE_UNIT
    per_unit = tl.where(largest > 0, LARGEST / tl.maximum(largest, TINY), 0.0)
    rounded0, rounded1 = _rounded(quarter0, per_unit), _rounded(quarter1, per_unit)
    rounded2, rounded3 = _rounded(quarter2, per_unit), _rounded(quarter3, per_unit)
    total = tl.sum(
        rounded0.to(tl.int32) + rounded1.to(tl.int32) + rounded2.to(tl.int32) + rounded3.to(tl.int32), axis=1
    )
    added = CODE_CENTRE * CODE_UNIT * unit * total.to(tl.float32)

    products = tl.dot(_two_bits(packed, 0, IS_PLAIN), tl.trans(rounded0), out_dtype=tl.int32)
    products = tl.dot(_two_bits(packed, 1, IS_PLAIN), tl.trans(rounded1), products, out_dtype=tl.int32)
    products = tl.dot(_two_bits(packed, 2, IS_PLAIN), tl.trans(rounded2), products, out_dtype=tl.int32)
    products = tl.dot(_two_bits(packed, 3, IS_PLAIN), tl.trans(rounded3), products, out_dtype=tl.int32)
    logits = (products.to(tl.float32) * unit[None, :] + added[None, :]) * worth[:, None]
    logits = tl.where(is_sampled[:, None], logits, float("-inf"))
    # Each sample stands for as many candidates.
    logits += tl.log2(number.to(tl.float32) / tl.maximum(num_sampled, 1).to(tl.float32))
    peak = tl.max(logits, axis=0)
    worths += (row * GROUP + heads) * (2 + SHARES)
    if share == 0:
        sink = tl.arange(0, SINKS)
        is_sink = (sink < first) & (sink < num_sinks)
        own_sinks = sinks + seat * sink_stride_seat + kv_head * sink_stride_head
        own_sinks += sink[None, :] * HEAD_DIM + dims[:, None]
        exact = tl.load(own_sinks, mask=is_sink[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        of_sinks = tl.dot(vectors, exact, input_precision="tf32") * scale
        of_sinks = tl.where(is_sink[None, :], of_sinks, float("-inf"))
        peak = tl.maximum(peak, tl.max(of_sinks, axis=1))
        base = tl.where(peak > float("-inf"), peak, 0.0)
        sum_of_sinks = tl.sum(tl.exp2(of_sinks - base[:, None]), axis=1)
        target = rounded + (row * GROUP + heads) * HEAD_DIM
        _store_quarter(rounded0, target, is_head, 0, HEAD_DIM, NUM_BYTES, BYTES)
        _store_quarter(rounded1, target, is_head, 1, HEAD_DIM, NUM_BYTES, BYTES)
        _store_quarter(rounded2, target, is_head, 2, HEAD_DIM, NUM_BYTES, BYTES)
        _store_quarter(rounded3, target, is_head, 3, HEAD_DIM, NUM_BYTES, BYTES)
        tl.store(worths, unit, mask=is_head)
        tl.store(worths + 1, added, mask=is_head)
    else:
        base = tl.where(peak > float("-inf"), peak, 0.0)
        sum_of_sinks = tl.zeros_like(peak)
    total_weight = tl.sum(tl.exp2(logits - base[None, :]), axis=0) + sum_of_sinks
    is_any = total_weight > 0
    total_weight = base + tl.log2(tl.where(is_any, total_weight, 1.0))
    tl.store(worths + 2 + share, tl.where(is_any, total_weight, float("-inf")), mask=is_head)


@triton.jit(
    do_not_specialize=["num_positions"], do_not_specialize_on_alignment=["seats", "begin", "end", "counts"]
)
def weigh_codes(
    codes, scales, seats, begin, end, counts, rounded, worths, target,
    num_kv_heads, num_positions, chunk_size, row_size, length, level_base,
    code_stride_seat, code_stride_head, scale_stride_seat, scale_stride_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_BYTES: tl.constexpr, SPAN: tl.constexpr,
    PEERS: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr, IS_PLAIN: tl.constexpr,
    IS_LEVELS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Weights of `chunk_size` positions of one head, summed over the group; -inf where there is no candidate. Or their
    levels, where `counts` are taken, of the tiles with a candidate; 0 where there is none.

    A row of the products is of PEERS adjacent tokens, SPAN bytes each, and a column of one of them and a query head, so
    that small groups and short codes leave no part of the tensor cores' tiles to zeros. length: positions of a head
    that there is memory for. IS_WHOLE: these are whole tiles of whole bytes, so that nothing need be masked where it is
    read, and what no candidate has may be anything.
    """
    row = tl.program_id(1).to(tl.int64)
    sequence, kv_head = row // num_kv_heads, row % num_kv_heads
    seat = tl.load(seats + sequence)
    first = tl.load(begin + sequence).to(tl.int32)
    last = tl.minimum(tl.load(end + sequence), num_positions).to(tl.int32)
    chunk = tl.program_id(0) * chunk_size
    stop = tl.minimum(chunk + chunk_size, num_positions)
    if IS_LEVELS:
        chunk = tl.maximum(chunk, first // (ROWS * PEERS) * (ROWS * PEERS))
        stop = tl.minimum(stop, last)
        of_count = tl.load(counts + sequence).to(tl.float32).to(tl.int32, bitcast=True) >> LEVEL_SHIFT
    if chunk >= stop:
        return
    codes += seat * code_stride_seat + kv_head * code_stride_head
    scales += seat * scale_stride_seat + kv_head * scale_stride_head
    target += row * row_size

    rounded += row * GROUP * HEAD_DIM
    query0 = _load_quarter(rounded, 0, GROUP, HEADS, HEAD_DIM, NUM_BYTES, SPAN, PEERS)
    query1 = _load_quarter(rounded, 1, GROUP, HEADS, HEAD_DIM, NUM_BYTES, SPAN, PEERS)
    query2 = _load_quarter(rounded, 2, GROUP, HEADS, HEAD_DIM, NUM_BYTES, SPAN, PEERS)
    query3 = _load_quarter(rounded, 3, GROUP, HEADS, HEAD_DIM, NUM_BYTES, SPAN, PEERS)
    heads, share = tl.arange(0, HEADS), tl.arange(0, SHARES)
    is_head = heads < GROUP
    worths += (row * GROUP + heads) * (2 + SHARES)
    unit = tl.load(worths, mask=is_head, other=0.0)
    added = tl.load(worths + 1, mask=is_head, other=0.0)
    totals = tl.load(worths[:, None] + 2 + share[None, :], mask=is_head[:, None], other=0.0)
    base = tl.maximum(tl.max(totals, axis=1), LOWEST)
    normaliser = base + tl.log2(tl.maximum(tl.sum(tl.exp2(totals - base[:, None]), axis=1), TINY))
    # A head that is none weighs nothing.
    normaliser = tl.where(is_head, normaliser, float("inf"))

    lane = tl.arange(0, PEERS * SPAN)
    byte, peer = lane % SPAN, lane // SPAN
    token_rows = tl.arange(0, ROWS) * PEERS
    tokens = token_rows[:, None] + tl.arange(0, PEERS)[None, :]
    places = token_rows[:, None] * NUM_BYTES + (peer * NUM_BYTES + byte)[None, :]
    # The pipeline fetches codes ahead, and leaves scales to us.
    if IS_WHOLE:
        coming = tl.load(scales + chunk + tokens)
    else:
        coming = tl.load(scales + chunk + tokens, mask=chunk + tokens < last, other=0.0)
    for start in range(chunk, stop, ROWS * PEERS):
        source = codes + tl.cast(start, tl.int64) * NUM_BYTES + places
        worth = coming.to(tl.float32)
        if IS_WHOLE:
            packed = tl.load(source).to(tl.int8, bitcast=True)
            coming = tl.load(scales + tl.minimum(start + ROWS * PEERS, length - ROWS * PEERS) + tokens)
        else:
            of_byte = start + token_rows[:, None] + peer[None, :]
            packed = tl.load(
                source, mask=(of_byte < last) & (byte < NUM_BYTES)[None, :], other=0
            ).to(tl.int8, bitcast=True)  # fmt: skip
            following = start + ROWS * PEERS + tokens
            coming = tl.load(scales + following, mask=following < last, other=0.0)
        products = tl.dot(_two_bits(packed, 0, IS_PLAIN), query0, out_dtype=tl.int32)
        products = tl.dot(_two_bits(packed, 1, IS_PLAIN), query1, products, out_dtype=tl.int32)
        products = tl.dot(_two_bits(packed, 2, IS_PLAIN), query2, products, out_dtype=tl.int32)
        products = tl.dot(_two_bits(packed, 3, IS_PLAIN), query3, products, out_dtype=tl.int32)
        by_token = tl.reshape(products, [ROWS, PEERS, HEADS]).to(tl.float32)
        logits = (by_token * unit[None, None, :] + added[None, None, :]) * worth[:, :, None]
        weights = tl.sum(tl.exp2(logits - normaliser[None, None, :]), axis=2)
        positions = start + tokens
        if IS_LEVELS:
            level = (weights.to(tl.int32, bitcast=True) >> LEVEL_SHIFT) + (of_count - level_base)
            level = tl.minimum(tl.maximum(level, MIN_LEVEL), MAX_LEVEL)
            # From `first` on and before `last`.
            is_candidate = (positions - first).to(tl.uint32, bitcast=True) < (last - first).to(tl.uint32)
            tl.store(target + positions, tl.where(is_candidate, level, 0).to(tl.int8))
        else:
            is_candidate = (positions >= first) & (positions < last)
            weights = tl.where(is_candidate, weights, float("-inf"))
            tl.store(target + positions, weights, mask=positions < num_positions)


@triton.jit
def _load_quarter(
    rounded, QUARTER: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_BYTES: tl.constexpr, SPAN: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    """Rounded queries in one quarter of the coordinates, once for each peer and 0 for the others: int8
    [PEERS * SPAN, PEERS * HEADS]."""
    lane, column = tl.arange(0, PEERS * SPAN), tl.arange(0, PEERS * HEADS)
    byte, head = lane % SPAN, column % HEADS
    coordinate = QUARTER * NUM_BYTES + byte
    is_used = ((byte < NUM_BYTES) & (coordinate < HEAD_DIM))[:, None] & (head < GROUP)[None, :]
    is_used &= (lane // SPAN)[:, None] == (column // HEADS)[None, :]
    return tl.load(rounded + head[None, :] * HEAD_DIM + coordinate[:, None], mask=is_used, other=0)
