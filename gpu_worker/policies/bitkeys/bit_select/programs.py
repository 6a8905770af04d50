"""The program of `kernel.py` that marks what may be taken by the levels of weights."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.marks.programs import span_of_row, tally_of

# Four bytes of 1, and their highest bits.
ONES = tl.constexpr(0x01010101)
SEVENS = tl.constexpr(0x80808080)


@triton.jit
def _reaching(words, level):
    """The highest bit of each byte, of 127 at most, that is no less than the level, which is 1 to 128."""
    return (words + (128 - level).to(tl.uint32) * ONES) & SEVENS


@triton.jit
def _number(flags):
    """How many bytes have their highest bit set."""
    return tl.sum((((flags >> 7) * ONES) >> 24).to(tl.int32), axis=0)


@triton.jit
def _threshold(words, asked):
    """The greatest level that `asked` bytes reach; 0 where those of 1 and more are fewer."""
    threshold = tl.full([], 0, tl.int32)
    for bit in tl.static_range(6, -1, -1):
        level = threshold + (1 << bit)
        threshold = tl.where(_number(_reaching(words, level)) >= asked, level, threshold)
    return threshold


@triton.jit(
    do_not_specialize=["num_positions", "num_tiles", "row_size"],
    do_not_specialize_on_alignment=["begin", "end", "counts"],
)
def mark_levels(
    begin, end, counts, planes, words, marks, tallies,
    num_kv_heads, num_positions, width, num_tiles, row_size, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Marks and tallies, as `kernels.marks` has them, of the program's share of the head's tiles with a candidate.

    planes: int8 [rows, 2, row_size], and words: the same as int32. What is no candidate has the level 0.
    """
    row, _sequence, first, last, asked = span_of_row(begin, end, counts, num_kv_heads, num_positions, width)
    chunk_tiles = tl.cdiv(tl.cdiv(last, TILE) - first // TILE, tl.num_programs(1))
    chunk_first = (first // TILE + tl.program_id(1) * chunk_tiles) * TILE
    chunk_last = tl.minimum(chunk_first + chunk_tiles * TILE, last)
    if (asked == 0) | (chunk_first >= chunk_last):
        return
    num_words = row_size // 4
    words += row * 2 * num_words
    word = tl.arange(0, WORDS)
    high = tl.load(words + word, mask=word < num_words, other=0).to(tl.uint32, bitcast=True)
    best = _threshold(high, asked)
    above = _reaching(high, best + 1)
    # All bytes reach a level of 0.
    reaching = tl.where(best > 0, _reaching(high, tl.maximum(best, 1)), SEVENS)
    tied = reaching ^ above
    low = tl.load(words + num_words + word, mask=word < num_words, other=0).to(tl.uint32, bitcast=True)
    threshold = best * 128 + _threshold(low & (tied - (tied >> 7)), asked - _number(above))

    planes += row * 2 * row_size
    marks += row * num_tiles * (TILE // 8)
    tallies += row * num_tiles
    eight, byte = tl.arange(0, 8), tl.arange(0, TILE // 8)
    for start in range(chunk_first, chunk_last, TILE):
        position = start + byte[:, None] * 8 + eight[None, :]
        is_inside = position < row_size
        level = tl.load(planes + position, mask=is_inside, other=0).to(tl.int32) * 128
        level += tl.load(planes + row_size + position, mask=is_inside, other=0).to(tl.int32)
        found = tl.where(level > threshold, 1, tl.where(level == threshold, 3, 0))
        mark = tl.sum(found << (2 * eight)[None, :], axis=1)
        tl.store(marks + start // 8 + byte, mark.to(tl.int16))
        tl.store(tallies + start // TILE, tl.sum(tally_of(mark), axis=0))
