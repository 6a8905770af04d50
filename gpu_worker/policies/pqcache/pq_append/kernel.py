"""Coding what leaves the window as one Triton kernel.

A program codes the token of one lane in one KV head of one layer, part after part. What counts is reading each codebook
once; the code and the count of its pair are written by the one program that has the seat.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.policies.pqcache.pq_append.reference import check_parts

# Of a codebook, at a time: 16 accesses of 16 bytes for each of 128 threads.
TILE_ELEMENTS = 8192


def pq_append(
    keys: Tensor,
    codebooks: Tensor,
    codes: Tensor,
    pair_counts: Tensor | None,
    seats: Tensor,
    positions: Tensor,
) -> None:
    """Write the codes of one token a lane, and count its pair of codes, in every layer and KV head, in place.

    A code is the nearest centroid's by L2; ties take the smallest.
    keys: [B, L, H_kv, d], views are read in place where the last stride is 1. codebooks: float32
    [seats, L, H_kv, m, ksub, d/m]. codes: uint8 [seats, L, H_kv, N, m], by position. pair_counts: int32
    [seats, L, H_kv, ksub * ksub], at c * ksub + e for the codes (c, e); None: not counted. seats: int64 [B], all
    different. positions: int64 [B]; -1: the lane has no token. All on one CUDA device; codebooks, codes and pair_counts
    may be views of some layers. Raises ValueError if pairs are to be counted and m is not 2.
    """
    check_parts(codebooks, pair_counts)
    batch, num_layers, num_kv_heads, _ = keys.shape
    num_parts, ksub, dsub = codebooks.shape[3:]
    if batch * num_layers * num_kv_heads == 0:
        return
    if keys.stride(-1) != 1:
        keys = keys.contiguous()
    counts = codes if pair_counts is None else pair_counts
    width = triton.next_power_of_2(dsub)
    block = min(triton.next_power_of_2(ksub), max(TILE_ELEMENTS // width, 1))
    _append[(batch * num_layers * num_kv_heads,)](
        keys, codebooks, codes, counts, seats.contiguous(), positions.contiguous(),
        num_layers, num_kv_heads, num_parts, ksub, dsub,
        *keys.stride()[:3], *codebooks.stride()[:3], *codes.stride()[:3], *counts.stride()[:3],
        COUNTED=pair_counts is not None, BLOCK=block, WIDTH=width, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["seats", "positions"])
def _append(
    keys, codebooks, codes, pair_counts, seats, positions, num_layers, num_kv_heads, num_parts, ksub, dsub,
    key_stride_row, key_stride_layer, key_stride_head, book_stride_seat, book_stride_layer, book_stride_head,
    code_stride_seat, code_stride_layer, code_stride_head, count_stride_seat, count_stride_layer, count_stride_head,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Code of one token in one KV head of one layer."""
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    layer = (tl.program_id(0) // num_kv_heads % num_layers).to(tl.int64)
    row = (tl.program_id(0) // num_kv_heads // num_layers).to(tl.int64)
    position = tl.load(positions + row)
    if position < 0:
        return
    seat = tl.load(seats + row)
    keys += row * key_stride_row + layer * key_stride_layer + head * key_stride_head
    codebooks += seat * book_stride_seat + layer * book_stride_layer + head * book_stride_head
    codes += (
        seat * code_stride_seat + layer * code_stride_layer + head * code_stride_head + position * num_parts
    )
    pair = tl.full([], 0, tl.int32)
    dims = tl.arange(0, WIDTH)
    for part in range(num_parts):
        vector = tl.load(keys + part * dsub + dims, mask=dims < dsub, other=0.0).to(tl.float32)
        best = tl.full([], float("inf"), tl.float32)
        code = tl.full([], 0, tl.int32)
        for first in range(0, ksub, BLOCK):
            rivals = first + tl.arange(0, BLOCK)
            is_rival = rivals < ksub
            centroids = tl.load(
                codebooks + (part * ksub + rivals[:, None]) * dsub + dims[None, :],
                mask=is_rival[:, None] & (dims < dsub)[None, :],
                other=0.0,
            )
            distances = tl.sum(centroids * (centroids - 2 * vector[None, :]), axis=1)
            distances = tl.where(is_rival, distances, float("inf"))
            nearest = tl.min(distances, axis=0)
            smallest = tl.min(tl.where(distances == nearest, rivals, ksub), axis=0)
            # Only a nearer one of a later block wins: ties take the smallest code.
            code = tl.where(nearest < best, smallest, code)
            best = tl.minimum(nearest, best)
        tl.store(codes + part, code.to(tl.uint8))
        pair = pair * ksub + code
    if COUNTED:
        pair_counts += seat * count_stride_seat + layer * count_stride_layer + head * count_stride_head
        tl.store(pair_counts + pair, tl.load(pair_counts + pair) + 1)
