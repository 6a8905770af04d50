"""The program of `kernel.py` that takes the best by the levels of their weights."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.spans import span_of_row

# Four bytes of 1, and their highest bits.
ONES = tl.constexpr(0x01010101)
FLAGS = tl.constexpr(0x80808080)
# How much further a 16-bit number of the next level is.
LEVEL_STEP = tl.constexpr(16)
# What of a level's low byte, shifted right once, is the level's, in four bytes; its lowest bit.
LOW_MASK = tl.constexpr(0x78787878)
LOW_BIT = tl.constexpr(3)
# Positions that are taken from at a time, four words; four 16-bit numbers of 1, the levels of such, and highest bits.
UNIT = tl.constexpr(16)
LANES = tl.constexpr(0x0001000100010001)
LEVELS_MASK = tl.constexpr(0x7FF07FF07FF07FF0)
LANE_FLAGS = tl.constexpr(0x8000800080008000)


@triton.jit
def _bytes(doubles, PLACE: tl.constexpr, IS_PLAIN: tl.constexpr):
    """The low (0) or the high (1) byte of each of four 16-bit numbers, uint32."""
    if IS_PLAIN:
        found = (doubles >> (8 * PLACE)) & 0x00FF00FF00FF00FF
        found = (found | (found >> 8)) & 0x0000FFFF0000FFFF
        return (found | (found >> 16)).to(tl.uint32)
    elif PLACE == 0:
        return tl.inline_asm_elementwise(
            "{.reg .b32 l, h; mov.b64 {l, h}, $1; prmt.b32 $0, l, h, 0x6420;}",
            "=r,l", [doubles], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 l, h; mov.b64 {l, h}, $1; prmt.b32 $0, l, h, 0x7531;}",
            "=r,l", [doubles], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _high(doubles, IS_PLAIN: tl.constexpr):
    return _bytes(doubles, 1, IS_PLAIN)


@triton.jit
def _low(doubles, IS_PLAIN: tl.constexpr):
    return (_bytes(doubles, 0, IS_PLAIN) >> 1) & LOW_MASK


@triton.jit
def _reaching(words, level):
    """The highest bit of each byte, of 127 at most, that is no less than the level, which is 0 to 128."""
    return (words + (128 - level).to(tl.uint32) * ONES) & FLAGS


@triton.jit
def _numbers(flags):
    """How many bytes of each word have their highest bit set."""
    return (((flags >> 7) * ONES) >> 24).to(tl.int32)


@triton.jit
def _sum_of_bytes(flags, total, IS_PLAIN: tl.constexpr):
    """128 for each byte with its highest bit set, and none else, added to the totals."""
    if IS_PLAIN:
        return total + 128 * _numbers(flags)
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, 0x01010101, $2;",
            "=r,r,r", [flags, total], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _number(parts, IS_PLAIN: tl.constexpr):
    """How many bytes have their highest bit set, of words in four parts."""
    total = _sum_of_bytes(parts[0], tl.zeros(parts[0].shape, tl.int32), IS_PLAIN)
    total = _sum_of_bytes(parts[1], total, IS_PLAIN)
    total = _sum_of_bytes(parts[2], total, IS_PLAIN)
    return tl.sum(_sum_of_bytes(parts[3], total, IS_PLAIN), axis=0) >> 7


@triton.jit
def _all_reaching(parts, level):
    return (
        _reaching(parts[0], level),
        _reaching(parts[1], level),
        _reaching(parts[2], level),
        _reaching(parts[3], level),
    )


@triton.jit
def _threshold(parts, asked, number, LEAST_BIT: tl.constexpr, IS_PLAIN: tl.constexpr):
    """The greatest level, a multiple of 2^LEAST_BIT, that `asked` of these `number` bytes reach, 0 where those of more
    are fewer; and how many reach it."""
    threshold = tl.full([], 0, tl.int32)
    for bit in tl.static_range(6, LEAST_BIT - 1, -1):
        level = threshold + (1 << bit)
        reaching = _number(_all_reaching(parts, level), IS_PLAIN)
        number = tl.where(reaching >= asked, reaching, number)
        threshold = tl.where(reaching >= asked, level, threshold)
    return threshold, number


@triton.jit
def _load_high(words, first_word, last_word, PART: tl.constexpr, SIZE: tl.constexpr, IS_PLAIN: tl.constexpr):
    word = PART * SIZE + tl.arange(0, SIZE)
    return _high(tl.load(words + word, mask=(word >= first_word) & (word < last_word), other=0), IS_PLAIN)


@triton.jit
def _tied(high, best):
    return _reaching(high, best) ^ _reaching(high, best + 1)


@triton.jit
def _load_low(words, tied, PART: tl.constexpr, IS_PLAIN: tl.constexpr):
    """Low bits of the bytes with a flag; else 0."""
    word = PART * tied.shape[0] + tl.arange(0, tied.shape[0])
    doubles = tl.load(words + word, mask=tied != 0, other=0)
    return _low(doubles, IS_PLAIN) & (tied - (tied >> 7))


@triton.jit
def _flags(levels, threshold):
    """The highest bit of each of four 16-bit numbers of which the level is no less than the threshold."""
    distance = (0x8000 - threshold).to(tl.uint64) * LANES
    return ((levels.to(tl.uint64, bitcast=True) & LEVELS_MASK) + distance) & LANE_FLAGS


@triton.jit
def _numbers_of_lanes(first, second, third, fourth):
    """How many of the 16 flags are set."""
    ones = (first >> 15) + (second >> 15) + (third >> 15) + (fourth >> 15)
    ones += ones >> 32
    return ((ones + (ones >> 16)) & 0xFFFF).to(tl.int32)


@triton.jit
def _compared(words, unit, is_used, threshold):
    """Of the 16 positions of each unit: flags of levels above the threshold, and of the same, four words each; and how
    many there are of the first kind, and in the high half of the second."""
    source = words + unit * 4
    first = tl.load(source, mask=is_used, other=0)
    second = tl.load(source + 1, mask=is_used, other=0)
    third = tl.load(source + 2, mask=is_used, other=0)
    fourth = tl.load(source + 3, mask=is_used, other=0)
    better = (
        _flags(first, threshold + LEVEL_STEP),
        _flags(second, threshold + LEVEL_STEP),
        _flags(third, threshold + LEVEL_STEP),
        _flags(fourth, threshold + LEVEL_STEP),
    )
    equal = (
        _flags(first, threshold) ^ better[0],
        _flags(second, threshold) ^ better[1],
        _flags(third, threshold) ^ better[2],
        _flags(fourth, threshold) ^ better[3],
    )
    number = _numbers_of_lanes(better[0], better[1], better[2], better[3])
    number += _numbers_of_lanes(equal[0], equal[1], equal[2], equal[3]) << 16
    return better, equal, number


@triton.jit(
    do_not_specialize=["num_positions"],
    do_not_specialize_on_alignment=["begin", "end", "counts"],
)
def take_levels(
    begin, end, counts, levels, words, taken, num_kv_heads, num_positions, width,
    WORDS: tl.constexpr, STEP: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Write what is taken of the program's share of a head's candidates, each at its rank in the head, and a share of
    the padding.

    levels: int16 [rows, 4 * WORDS], 16 times the level of each position and at most 15 more; those beyond the tiles
    with a candidate may be anything. What is no candidate has the level 0, and candidates have high bits other than 0.
    words: the same as int64.
    """
    row, _sequence, first, last, asked = span_of_row(begin, end, counts, num_kv_heads, num_positions, width)
    program, programs = tl.program_id(1), tl.num_programs(1)
    taken += row * width
    step = tl.arange(0, STEP)
    first_unit, last_unit = first // UNIT, tl.cdiv(last, UNIT)
    chunk_units = tl.cdiv(tl.cdiv(last_unit - first_unit, STEP), programs) * STEP
    chunk_first = first_unit + program * chunk_units
    chunk_last = tl.minimum(chunk_first + chunk_units, last_unit)
    if (asked > 0) & (chunk_first < chunk_last):
        words += row * WORDS
        size: tl.constexpr = WORDS // 4
        first_word, last_word = first // 4, tl.cdiv(last, 4)
        high = (
            _load_high(words, first_word, last_word, 0, size, IS_PLAIN),
            _load_high(words, first_word, last_word, 1, size, IS_PLAIN),
            _load_high(words, first_word, last_word, 2, size, IS_PLAIN),
            _load_high(words, first_word, last_word, 3, size, IS_PLAIN),
        )
        best, num_reaching = _threshold(high, asked, last - first, 0, IS_PLAIN)
        tied = _tied(high[0], best), _tied(high[1], best), _tied(high[2], best), _tied(high[3], best)
        num_tied = _number(tied, IS_PLAIN)
        low = (
            _load_low(words, tied[0], 0, IS_PLAIN),
            _load_low(words, tied[1], 1, IS_PLAIN),
            _load_low(words, tied[2], 2, IS_PLAIN),
            _load_low(words, tied[3], 3, IS_PLAIN),
        )
        num_above = num_reaching - num_tied
        fine, num_fine = _threshold(low, asked - num_above, num_tied, LOW_BIT, IS_PLAIN)
        threshold = best * 256 + fine * 2
        # Of the head's ties, the lowest are left out.
        skip = num_above + num_fine - asked

        numbers = tl.zeros([STEP], tl.int32)
        for start in range(first_unit, chunk_first, STEP):
            _better, _equal, number = _compared(words, start + step, start + step < chunk_first, threshold)
            numbers += number
        above_before = tl.sum(numbers & 0xFFFF, axis=0)
        ties_before = tl.sum(numbers >> 16, axis=0)
        # The unit of which some ties are taken and some are not; and what is better and what ties before it.
        split = tl.zeros([STEP], tl.int32)
        above_split = tl.zeros([STEP], tl.int32)
        ties_split = tl.zeros([STEP], tl.int32)
        for start in range(chunk_first, chunk_last, STEP):
            unit = start + step
            better, equal, number = _compared(words, unit, unit < chunk_last, threshold)
            before = tl.cumsum(number, axis=0) - number
            above = above_before + (before & 0xFFFF)
            tie = ties_before + (before >> 16)
            is_split = (tie < skip) & (tie + (number >> 16) > skip)
            split = tl.where(is_split, unit + 1, split)
            above_split = tl.where(is_split, above, above_split)
            ties_split = tl.where(is_split, tie, ties_split)
            rank = above + tl.maximum(tie - skip, 0)
            position = unit.to(tl.int64) * UNIT
            for word in tl.static_range(4):
                chosen = tl.where(is_split, 0, better[word] | tl.where(tie >= skip, equal[word], 0))
                for lane in tl.static_range(4):
                    is_taken = ((chosen >> (16 * lane + 15)) & 1).to(tl.int32)
                    tl.store(taken + rank, position + (4 * word + lane), mask=is_taken > 0)
                    rank += is_taken
            total = tl.sum(number, axis=0)
            above_before += total & 0xFFFF
            ties_before += total >> 16
        split_unit = tl.max(split, axis=0)
        if split_unit > 0:
            position = (split_unit - 1) * UNIT + tl.arange(0, UNIT)
            level = tl.load(levels + row * WORDS * 4 + position).to(tl.int32) // LEVEL_STEP * LEVEL_STEP
            is_better, is_equal = (level > threshold).to(tl.int32), (level == threshold).to(tl.int32)
            number = is_better + (is_equal << 16)
            before = tl.cumsum(number, axis=0) - number
            tie = tl.max(ties_split, axis=0) + (before >> 16)
            rank = tl.max(above_split, axis=0) + (before & 0xFFFF) + tl.maximum(tie - skip, 0)
            is_taken = is_better | (is_equal & (tie >= skip).to(tl.int32))
            tl.store(taken + rank, position.to(tl.int64), mask=is_taken > 0)
    for start in range(asked + program * STEP, width, programs * STEP):
        tl.store(taken + start + step, tl.full([STEP], -1, tl.int64), mask=start + step < width)
