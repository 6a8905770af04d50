"""The program of `kernel.py` that takes the best by the levels of their weights."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.marks.programs import span_of_row

# Four bytes of 1, of 127, and their highest bits.
ONES = tl.constexpr(0x01010101)
SEVENS = tl.constexpr(0x7F7F7F7F)
FLAGS = tl.constexpr(0x80808080)


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
    return (_bytes(doubles, 0, IS_PLAIN) >> 1) & SEVENS


@triton.jit
def _reaching(words, level):
    """The highest bit of each byte, of 127 at most, that is no less than the level, which is 0 to 128."""
    return (words + (128 - level).to(tl.uint32) * ONES) & FLAGS


@triton.jit
def _numbers(flags):
    """How many bytes of each word have their highest bit set."""
    return (((flags >> 7) * ONES) >> 24).to(tl.int32)


@triton.jit
def _number(parts):
    """How many bytes have their highest bit set, of words in four parts."""
    ones = (parts[0] >> 7) + (parts[1] >> 7) + (parts[2] >> 7) + (parts[3] >> 7)
    return tl.sum(((ones * ONES) >> 24).to(tl.int32), axis=0)


@triton.jit
def _all_reaching(parts, level):
    return (
        _reaching(parts[0], level),
        _reaching(parts[1], level),
        _reaching(parts[2], level),
        _reaching(parts[3], level),
    )


@triton.jit
def _threshold(parts, asked, number):
    """The greatest level that `asked` of these `number` bytes reach, 0 where those of 1 and more are fewer; and how
    many reach it."""
    threshold = tl.full([], 0, tl.int32)
    for bit in tl.static_range(6, -1, -1):
        level = threshold + (1 << bit)
        reaching = _number(_all_reaching(parts, level))
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
def _compared(doubles, best, fine, IS_PLAIN: tl.constexpr):
    """Flags of the levels above the one of these two halves, and of the same."""
    high, low = _high(doubles, IS_PLAIN), _low(doubles, IS_PLAIN)
    above = _reaching(high, best + 1)
    tied = _reaching(high, best) ^ above
    over = tied & _reaching(low, fine + 1)
    return above | over, (tied & _reaching(low, fine)) ^ over


@triton.jit(
    do_not_specialize=["num_positions"],
    do_not_specialize_on_alignment=["begin", "end", "counts"],
)
def take_levels(
    begin, end, counts, words, taken, num_kv_heads, num_positions, width,
    WORDS: tl.constexpr, STEP: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Write what is taken of the program's share of a head's candidates, each at its rank in the head, and a share of
    the padding.

    words: int64 [rows, WORDS], twice the levels of four positions each; those beyond the tiles with a candidate
    may be anything. What is no candidate has the level 0, and candidates have high bits other than 0.
    """
    row, _sequence, first, last, asked = span_of_row(begin, end, counts, num_kv_heads, num_positions, width)
    program, programs = tl.program_id(1), tl.num_programs(1)
    taken += row * width
    step = tl.arange(0, STEP)
    first_word, last_word = first // 4, tl.cdiv(last, 4)
    chunk_words = tl.cdiv(tl.cdiv(last_word - first_word, STEP), programs) * STEP
    chunk_first = first_word + program * chunk_words
    chunk_last = tl.minimum(chunk_first + chunk_words, last_word)
    if (asked > 0) & (chunk_first < chunk_last):
        words += row * WORDS
        size: tl.constexpr = WORDS // 4
        high = (
            _load_high(words, first_word, last_word, 0, size, IS_PLAIN),
            _load_high(words, first_word, last_word, 1, size, IS_PLAIN),
            _load_high(words, first_word, last_word, 2, size, IS_PLAIN),
            _load_high(words, first_word, last_word, 3, size, IS_PLAIN),
        )
        best, num_reaching = _threshold(high, asked, last - first)
        tied = _tied(high[0], best), _tied(high[1], best), _tied(high[2], best), _tied(high[3], best)
        num_tied = _number(tied)
        low = (
            _load_low(words, tied[0], 0, IS_PLAIN),
            _load_low(words, tied[1], 1, IS_PLAIN),
            _load_low(words, tied[2], 2, IS_PLAIN),
            _load_low(words, tied[3], 3, IS_PLAIN),
        )
        num_above = num_reaching - num_tied
        fine, num_fine = _threshold(low, asked - num_above, num_tied)
        # Of the head's ties, the lowest are left out.
        skip = num_above + num_fine - asked

        # Better ones, and in the high half equal ones.
        numbers = tl.zeros([STEP], tl.int32)
        for start in range(first_word, chunk_first, STEP):
            better, equal = _compared(tl.load(words + start + step), best, fine, IS_PLAIN)
            numbers += _numbers(better) + (_numbers(equal) << 16)
        above_before = tl.sum(numbers & 0xFFFF, axis=0)
        ties_before = tl.sum(numbers >> 16, axis=0)
        for start in range(chunk_first, chunk_last, STEP):
            place = start + step
            doubles = tl.load(words + place, mask=place < chunk_last, other=0)
            better, equal = _compared(doubles, best, fine, IS_PLAIN)
            number = _numbers(better) + (_numbers(equal) << 16)
            before = tl.cumsum(number, axis=0) - number
            total = tl.sum(number, axis=0)
            tie = ties_before + (before >> 16)
            rank = above_before + (before & 0xFFFF) + tl.maximum(tie - skip, 0)
            position = place.to(tl.int64) * 4
            for p in tl.static_range(4):
                is_tie = ((equal >> (8 * p + 7)) & 1).to(tl.int32)
                is_taken = ((better >> (8 * p + 7)) & 1).to(tl.int32) | (is_tie & (tie >= skip).to(tl.int32))
                tl.store(taken + rank, position + p, mask=is_taken > 0)
                rank += is_taken
                tie += is_tie
            above_before += total & 0xFFFF
            ties_before += total >> 16
    for start in range(asked + program * STEP, width, programs * STEP):
        tl.store(taken + start + step, tl.full([STEP], -1, tl.int64), mask=start + step < width)
