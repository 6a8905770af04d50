"""Marks of what may be taken of a head, two bits a position; and the positions that these name, written in order.

Of 8 positions in an int16: bit 2p says whether the p-th is eligible, bit 2p + 1 whether it is tied. A tile's tally is
how many are eligible, and in the high half how many are tied. Of a head's ties the lowest are left out.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def span_of_row(begin, end, counts, num_kv_heads, num_positions, width):
    """Number of the head, its sequence, its candidates as [first, last), and how many of them are asked for."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // num_kv_heads
    first = tl.maximum(tl.load(begin + sequence), 0).to(tl.int32)
    last = tl.minimum(tl.load(end + sequence), num_positions).to(tl.int32)
    asked = tl.minimum(tl.load(counts + sequence), width).to(tl.int32)
    asked = tl.minimum(asked, last - first)
    return row, sequence, first, last, tl.maximum(asked, 0)


@triton.jit
def tally_of(mark):
    """How many positions of each mark are eligible, and in the high half how many are tied."""
    count = (mark & 0x5555) | ((mark & 0xAAAA) << 15)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    count = (count & 0x0F0F0F0F) + ((count >> 4) & 0x0F0F0F0F)
    return (count & 0x00FF00FF) + ((count >> 8) & 0x00FF00FF)


@triton.jit(
    do_not_specialize=["num_positions", "num_tiles"],
    do_not_specialize_on_alignment=["begin", "end", "counts"],
)
def write_taken(
    begin, end, counts, marks, tallies, taken, num_kv_heads, num_positions, width, num_tiles,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write what is taken of some tiles of one head at its rank in the head, and a share of the padding."""
    row, _sequence, first, last, asked = span_of_row(begin, end, counts, num_kv_heads, num_positions, width)
    program, programs = tl.program_id(1), tl.num_programs(1)
    taken += row * width
    marks += row * num_tiles * (TILE // 8)
    byte = tl.arange(0, TILE // 8)
    num_taken = asked
    if asked > 0:
        tiles = tl.arange(0, TILES)
        is_marked = (tiles >= first // TILE) & (tiles * TILE < last)
        tally = tl.load(tallies + row * num_tiles + tiles, mask=is_marked, other=0)
        eligible, tied = tally & 0xFFFF, tally >> 16
        num_eligible = tl.sum(eligible, axis=0)
        num_taken = tl.minimum(asked, num_eligible)
        # Of the head's ties, how many are too low to be taken.
        skip = num_eligible - num_taken
        for tile in range(first // TILE + program, tl.cdiv(last, TILE), programs):
            mark = tl.load(marks + tile * (TILE // 8) + byte).to(tl.int32)
            ties_before = tl.sum(tl.where(tiles < tile, tied, 0), axis=0)
            above_before = tl.sum(tl.where(tiles < tile, eligible, 0), axis=0) - ties_before
            number = tally_of(mark)
            before = tl.cumsum(number, axis=0) - number
            tie = ties_before + (before >> 16)
            rank = above_before + (before & 0xFFFF) - (before >> 16) + tl.maximum(tie - skip, 0)
            position = (tile * TILE + byte * 8).to(tl.int64)
            for p in tl.static_range(8):
                is_tie = (mark >> (2 * p + 1)) & 1
                is_taken = ((mark >> (2 * p)) & 1) & ((tie >= skip).to(tl.int32) | (is_tie ^ 1))
                tl.store(taken + rank, position + p, mask=(is_taken > 0) & (rank < width))
                rank += is_taken
                tie += is_tie
    for start in range(num_taken + program * (TILE // 8), width, programs * (TILE // 8)):
        tl.store(taken + start + byte, tl.full([TILE // 8], -1, tl.int64), mask=start + byte < width)
