"""Chunks in Triton: a program does one chunk of one head, a tile of rows at a time.

The first tile stays in registers, so that a chunk that fits is read once. What is longer is read again for each step,
by the program that has just read it, from a cache. The last chunk may be many times as long as the others: it begins
first, so that it runs beside them and not after them.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.policies.protokv.chunks import reference
from gpu_worker.policies.protokv.chunks.reference import chunk_length

# Of a tile: 64 numbers a thread. A chunk is some tiles: what a warp has at once hides more than what fills an SM.
TILE_ELEMENTS = 2048
NUM_WARPS = 1
MOST_ROWS = 64
EPS = tl.constexpr(reference.EPS)


def irregularity(keys: Tensor, num_chunks: int) -> Tensor:
    """See the reference. On a CUDA device; the keys' last stride is 1."""
    num_heads, num_rows, width = keys.shape
    length = chunk_length(num_rows, num_chunks)
    scores = torch.empty(num_heads, num_rows, dtype=torch.float32, device=keys.device)
    if num_heads:
        score_chunk[(num_heads * num_chunks,)](
            keys, scores, *keys.stride()[:2], length, num_rows, num_heads, num_chunks,
            **_tile(length, width), num_warps=NUM_WARPS,
        )  # fmt: skip
    return scores


def chunk_sums(keys: Tensor, num_chunks: int, is_member: Tensor | None = None) -> Tensor:
    """See the reference. All on one CUDA device; the keys' last stride is 1. What is no member is not read."""
    num_heads, num_rows, width = keys.shape
    length = chunk_length(num_rows, num_chunks)
    sums = torch.empty(num_heads, num_chunks, width, dtype=torch.float32, device=keys.device)
    if num_heads:
        members = None if is_member is None else is_member.view(torch.uint8)
        sum_chunk[(num_heads * num_chunks,)](
            keys, members, sums, *keys.stride()[:2], *((0, 0) if members is None else members.stride()),
            length, num_rows, num_heads, num_chunks,
            **_tile(length, width), num_warps=NUM_WARPS,
        )  # fmt: skip
    return sums


def _tile(length: int, width: int) -> dict[str, int]:
    """Width, and a tile that holds a chunk where it may."""
    lanes = max(16, triton.next_power_of_2(width))
    most = max(1, min(MOST_ROWS, TILE_ELEMENTS // lanes))
    return {"WIDTH": width, "LANES": lanes, "ROWS": min(max(16, triton.next_power_of_2(length)), most)}


@triton.jit
def _own_chunk(length, num_rows, num_heads, num_chunks):
    """Head, chunk, first row, and number of rows of this program."""
    number = tl.program_id(0)
    chunk = num_chunks - 1 - number // num_heads
    first = chunk * length
    # A rest belongs to the last one.
    num_here = tl.where(chunk == num_chunks - 1, num_rows - first, length)
    return (number % num_heads).to(tl.int64), chunk, first, num_here


@triton.jit
def _apart(tile, mean, is_row):
    """Sum of squared distances of a tile's rows from the mean. Beyond the width both are 0."""
    apart = tile.to(tl.float32) - mean[None, :]
    return tl.sum(tl.where(is_row, tl.sum(apart * apart, axis=1), 0.0))


@triton.jit
def _turned(tile, unit):
    """1 - cos of each row with the mean, as half a squared distance of directions."""
    rows = tile.to(tl.float32)
    # A division for each row, not for each number.
    shrunk = 1 / tl.maximum(tl.sqrt(tl.sum(rows * rows, axis=1)), EPS)
    apart = rows * shrunk[:, None] - unit[None, :]
    return tl.sum(apart * apart, axis=1) / 2


@triton.jit
def _store(scores, place, score, is_row):
    # What is no number compares with nothing.
    tl.store(scores + place, tl.where(score == score, score, 0.0), mask=is_row)


@triton.jit(do_not_specialize=["length", "num_rows", "num_heads", "num_chunks"])
def score_chunk(
    keys, scores, stride_head, stride_row, length, num_rows, num_heads, num_chunks,
    WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, _chunk, first, num_here = _own_chunk(length, num_rows, num_heads, num_chunks)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, LANES)
    is_dim = dims < WIDTH
    of_keys = keys + head * stride_head + first.to(tl.int64) * stride_row + dims[None, :]
    scores += head * num_rows + first
    is_row = rows < num_here
    source = of_keys + rows[:, None].to(tl.int64) * stride_row
    tile = tl.load(source, mask=is_row[:, None] & is_dim[None, :], other=0.0)

    total = tl.sum(tile.to(tl.float32), axis=0)
    for begin in range(ROWS, num_here, ROWS):
        place = begin + rows
        is_more = (place < num_here)[:, None] & is_dim[None, :]
        more = tl.load(of_keys + place[:, None].to(tl.int64) * stride_row, mask=is_more, other=0.0)
        total += tl.sum(more.to(tl.float32), axis=0)
    mean = total / num_here.to(tl.float32)

    squares = _apart(tile, mean, is_row)
    for begin in range(ROWS, num_here, ROWS):
        place = begin + rows
        is_more = (place < num_here)[:, None] & is_dim[None, :]
        more = tl.load(of_keys + place[:, None].to(tl.int64) * stride_row, mask=is_more, other=0.0)
        squares += _apart(more, mean, place < num_here)
    spread = tl.maximum(tl.sqrt(squares / num_here.to(tl.float32)), EPS)

    unit = mean / tl.maximum(tl.sqrt(tl.sum(mean * mean)), EPS)
    _store(scores, rows, _turned(tile, unit) / spread, is_row)
    for begin in range(ROWS, num_here, ROWS):
        place = begin + rows
        is_more = (place < num_here)[:, None] & is_dim[None, :]
        more = tl.load(of_keys + place[:, None].to(tl.int64) * stride_row, mask=is_more, other=0.0)
        _store(scores, place, _turned(more, unit) / spread, place < num_here)


@triton.jit(do_not_specialize=["length", "num_rows", "num_heads", "num_chunks"])
def sum_chunk(
    keys, is_member, sums, stride_head, stride_row, member_stride_head, member_stride_row,
    length, num_rows, num_heads, num_chunks,
    WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, chunk, first, num_here = _own_chunk(length, num_rows, num_heads, num_chunks)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, LANES)
    is_dim = dims < WIDTH
    of_keys = keys + head * stride_head + first.to(tl.int64) * stride_row + dims[None, :]
    total = tl.zeros([LANES], tl.float32)
    for begin in range(0, num_here, ROWS):
        place = begin + rows
        is_in = place < num_here
        if is_member is not None:
            of_members = is_member + head * member_stride_head + (first + place) * member_stride_row
            is_in = is_in & (tl.load(of_members, mask=is_in, other=0) != 0)
        source = of_keys + place[:, None].to(tl.int64) * stride_row
        tile = tl.load(source, mask=is_in[:, None] & is_dim[None, :], other=0.0)
        total += tl.sum(tile.to(tl.float32), axis=0)
    tl.store(sums + (head * num_chunks + chunk) * WIDTH + dims, total, mask=is_dim)
