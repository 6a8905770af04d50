"""PQ scoring as Triton kernels: tables, softmax totals per chunk, weights.

A head here is one KV head of one lane, and its positions are cut into at most NUM_CHUNKS chunks; one program takes a
chunk of a head in tiles [query heads of the group, positions], so that a code read once serves the whole group, and
the table of one head and part (256 bytes at 64 centroids) lies in two cache lines. The normaliser needs every chunk:
the first pass leaves (largest score, sum of exponentials) of each, and every program of the second pass reduces the
few of its head again, which is cheaper than one more launch. Codes are read twice, the scores written once.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
NUM_CHUNKS = 64
TILE_ELEMENTS = 8192


def pq_score(
    query: Tensor,
    codebooks: Tensor,
    codes: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    scale: float,
    num_positions: int,
    beside: Tensor | None = None,
) -> Tensor:
    """See the reference. All tensors lie on one CUDA device; codes may have any strides, codebooks be a view of one
    layer."""
    num_kv_heads, num_parts, ksub, dsub = codebooks.shape[1:]
    batch, num_heads = query.shape[:2]
    group, num_rows = num_heads // num_kv_heads, batch * num_kv_heads
    scores = torch.empty(batch, num_kv_heads, num_positions, dtype=torch.float32, device=query.device)
    if scores.numel() == 0:
        return scores
    seats, begin, end = seats.contiguous(), begin.contiguous(), end.contiguous()
    tables = torch.empty(num_rows, group, num_parts, ksub, dtype=torch.float32, device=query.device)
    block = min(64, triton.next_power_of_2(ksub))
    _tables[(batch * num_heads * num_parts, triton.cdiv(ksub, block))](
        query.contiguous(), codebooks, tables, seats, scale * LOG2_E, num_kv_heads, group, num_parts, ksub, dsub,
        *codebooks.stride()[:2], BLOCK=block, WIDTH=triton.next_power_of_2(dsub), num_warps=4,
    )  # fmt: skip

    group_width = triton.next_power_of_2(group)
    tile = min(2048, TILE_ELEMENTS // group_width)
    chunk = tile * triton.cdiv(num_positions, tile * NUM_CHUNKS)
    num_chunks = triton.cdiv(num_positions, chunk)
    totals = torch.empty(2, num_rows, group, num_chunks, dtype=torch.float32, device=query.device)
    shape = (num_kv_heads, num_positions, chunk, num_chunks, *codes.stride())
    options = {
        "GROUP": group,
        "GROUP_WIDTH": group_width,
        "NUM_PARTS": num_parts,
        "KSUB": ksub,
        "TILE": tile,
        "num_warps": 8,
    }
    grid = (num_rows * num_chunks,)
    _chunk_totals[grid](tables, codes, seats, begin, end, totals[0], totals[1], *shape, **options)
    # A pointer that is not read, where there is nothing beside.
    others = totals if beside is None else (beside * LOG2_E).contiguous()
    _weights[grid](
        tables, codes, seats, begin, end, totals[0], totals[1], others, scores, *shape, **options,
        CHUNKS=NUM_CHUNKS, HAS_OTHERS=beside is not None,
    )  # fmt: skip
    return scores


@triton.jit(do_not_specialize_on_alignment=["seats"])
def _tables(
    query, codebooks, tables, seats, scale, num_kv_heads, group, num_parts, ksub, dsub, stride_seat, stride_head,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scaled inner products, in base 2, of one part of one query head with BLOCK centroids of its head."""
    head, part = (tl.program_id(0) // num_parts).to(tl.int64), tl.program_id(0) % num_parts
    codes, dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    is_code, is_dim = codes < ksub, dims < dsub
    row = head // group
    seat = tl.load(seats + row // num_kv_heads)
    book = codebooks + seat * stride_seat + row % num_kv_heads * stride_head + part * ksub * dsub
    centroids = tl.load(
        book + codes[:, None] * dsub + dims[None, :], mask=is_code[:, None] & is_dim[None, :], other=0.0
    )
    vector = tl.load(query + (head * num_parts + part) * dsub + dims, mask=is_dim, other=0.0)
    products = tl.sum(centroids * vector.to(tl.float32)[None, :], axis=1) * scale
    tl.store(tables + (head * num_parts + part) * ksub + codes, products, mask=is_code)


@triton.jit
def _lookup(
    tables, codes, row, start, is_candidate, stride_position, stride_part,
    GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr, NUM_PARTS: tl.constexpr, KSUB: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Scores [GROUP_WIDTH, TILE] of the positions from start, in base 2; -inf where no candidate is."""
    heads = tl.arange(0, GROUP_WIDTH)
    # 64-bit arithmetic stays scalar.
    tables += row * (GROUP * NUM_PARTS * KSUB)
    codes += tl.cast(start, tl.int64) * stride_position
    places = tl.arange(0, TILE) * stride_position
    is_used = (heads < GROUP)[:, None] & is_candidate[None, :]
    scores = tl.zeros([GROUP_WIDTH, TILE], dtype=tl.float32)
    for part in tl.static_range(NUM_PARTS):
        # What is no candidate may hold any byte, also one that is no code.
        code = tl.load(codes + places + part * stride_part, mask=is_candidate, other=0).to(tl.int32)
        products = (tables + (part * KSUB + code))[None, :] + heads[:, None] * (NUM_PARTS * KSUB)
        scores += tl.load(products, mask=is_used, other=0.0)
    return tl.where(is_candidate[None, :], scores, float("-inf"))


@triton.jit
def _chunk(codes, seats, begin, end, num_kv_heads, num_positions, num_chunks, stride_seat, stride_head):
    """This program's head and chunk, the head's codes, and its candidates as [first, last)."""
    row, index = (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks
    sequence, kv_head = row // num_kv_heads, row % num_kv_heads
    first = tl.load(begin + sequence).to(tl.int32)
    last = tl.minimum(tl.load(end + sequence), num_positions).to(tl.int32)
    codes += tl.load(seats + sequence) * stride_seat + kv_head * stride_head
    return row, index, codes, first, last


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["seats", "begin", "end"])
def _chunk_totals(
    tables, codes, seats, begin, end, peaks, sums, num_kv_heads, num_positions, chunk, num_chunks,
    stride_seat, stride_head, stride_position, stride_part,
    GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr, NUM_PARTS: tl.constexpr, KSUB: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Largest score and sum of exponentials of every head of the group over one chunk's candidates."""
    row, index, codes, first, last = _chunk(
        codes, seats, begin, end, num_kv_heads, num_positions, num_chunks, stride_seat, stride_head
    )
    chunk_begin = index * chunk
    # Every tile between these holds a candidate, so that the largest score is finite from the first tile on. Where
    # there is no candidate at all, NaN may be left, and nothing reads it.
    tiles_begin = tl.maximum(chunk_begin, first // TILE * TILE)
    tiles_end = tl.minimum(chunk_begin + chunk, last)
    peak = tl.full([GROUP_WIDTH], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_WIDTH], dtype=tl.float32)
    for start in range(tiles_begin, tiles_end, TILE):
        positions = start + tl.arange(0, TILE)
        is_candidate = (positions >= first) & (positions < last)
        scores = _lookup(
            tables, codes, row, start, is_candidate, stride_position, stride_part,
            GROUP, GROUP_WIDTH, NUM_PARTS, KSUB, TILE,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(scores - higher[:, None]), axis=1)
        peak = higher
    heads = tl.arange(0, GROUP_WIDTH)
    place = (row * GROUP + heads) * num_chunks + index
    tl.store(peaks + place, peak, mask=heads < GROUP)
    tl.store(sums + place, total, mask=heads < GROUP)


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["seats", "begin", "end"])
def _weights(
    tables, codes, seats, begin, end, peaks, sums, others, output, num_kv_heads, num_positions, chunk, num_chunks,
    stride_seat, stride_head, stride_position, stride_part,
    GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr, NUM_PARTS: tl.constexpr, KSUB: tl.constexpr,
    TILE: tl.constexpr, CHUNKS: tl.constexpr, HAS_OTHERS: tl.constexpr,
):  # fmt: skip
    """Weights of one chunk, summed over the group; -inf where there is no candidate. others: of each head, base 2."""
    row, index, codes, first, last = _chunk(
        codes, seats, begin, end, num_kv_heads, num_positions, num_chunks, stride_seat, stride_head
    )
    output += row * num_positions

    heads, chunks = tl.arange(0, GROUP_WIDTH), tl.arange(0, CHUNKS)
    place = (row * GROUP + heads[:, None]) * num_chunks + chunks[None, :]
    is_written = (heads < GROUP)[:, None] & (chunks < num_chunks)[None, :]
    peak = tl.load(peaks + place, mask=is_written, other=float("-inf"))
    total = tl.load(sums + place, mask=is_written, other=0.0)
    top = tl.max(peak, axis=1)
    normaliser = top + tl.log2(tl.sum(total * tl.exp2(peak - top[:, None]), axis=1))
    if HAS_OTHERS:
        other = tl.load(others + row * GROUP + heads, mask=heads < GROUP, other=float("-inf"))
        larger = tl.maximum(normaliser, other)
        normaliser = larger + tl.log2(tl.exp2(normaliser - larger) + tl.exp2(other - larger))

    chunk_begin = index * chunk
    chunk_end = tl.minimum(chunk_begin + chunk, num_positions)
    for start in range(chunk_begin, chunk_end, TILE):
        positions = start + tl.arange(0, TILE)
        is_candidate = (positions >= first) & (positions < last)
        scores = _lookup(
            tables, codes, row, start, is_candidate, stride_position, stride_part,
            GROUP, GROUP_WIDTH, NUM_PARTS, KSUB, TILE,
        )  # fmt: skip
        weights = tl.where((heads < GROUP)[:, None], tl.exp2(scores - normaliser[:, None]), 0.0)
        weights = tl.where(is_candidate, tl.sum(weights, axis=0), float("-inf"))
        tl.store(output + positions, weights, mask=positions < num_positions)
