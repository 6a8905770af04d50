"""The program of `kernel.py` that takes the best by the levels of their weights."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.spans import span_of_row

# Four bytes of 1, and their highest bits.
ONES = tl.constexpr(0x01010101)
FLAGS = tl.constexpr(0x80808080)
# Of a level; the next bit of its byte is free for a flag.
LEVEL_BITS = tl.constexpr(7)
# Positions of a word, a byte each.
LANES = tl.constexpr(4)
# Words: a part of every tile whose levels are written as one.
TILE = tl.constexpr(64)


@triton.jit
def _reaching(words, level):
    """The highest bit of each byte, of 127 at most, that is no less than the level, which is 0 to 128."""
    return (words + (128 - level).to(tl.uint32) * ONES) & FLAGS


@triton.jit
def _sum_of_bytes(words, total, IS_PLAIN: tl.constexpr):
    """The four bytes of each word, added to the totals, int32."""
    if IS_PLAIN:
        pairs = (words & 0x00FF00FF) + ((words >> 8) & 0x00FF00FF)
        return total + ((pairs + (pairs >> 16)) & 0xFFFF).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, 0x01010101, $2;",
            "=r,r,r", [words, total], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _number(parts, IS_PLAIN: tl.constexpr):
    """How many bytes have their highest bit set, and no other, of words in four parts."""
    total = _sum_of_bytes(parts[0], tl.zeros(parts[0].shape, tl.int32), IS_PLAIN)
    total = _sum_of_bytes(parts[1], total, IS_PLAIN)
    total = _sum_of_bytes(parts[2], total, IS_PLAIN)
    return tl.sum(_sum_of_bytes(parts[3], total, IS_PLAIN), axis=0) >> LEVEL_BITS


@triton.jit
def _all_reaching(parts, level):
    return (
        _reaching(parts[0], level),
        _reaching(parts[1], level),
        _reaching(parts[2], level),
        _reaching(parts[3], level),
    )


@triton.jit
def _threshold(parts, asked, number, IS_PLAIN: tl.constexpr):
    """The greatest level that `asked` of these `number` bytes reach, and how many reach it."""
    threshold = tl.full([], 0, tl.int32)
    for bit in tl.static_range(LEVEL_BITS - 1, -1, -1):
        level = threshold + (1 << bit)
        reaching = _number(_all_reaching(parts, level), IS_PLAIN)
        number = tl.where(reaching >= asked, reaching, number)
        threshold = tl.where(reaching >= asked, level, threshold)
    return threshold, number


@triton.jit
def _load(words, first, last, PART: tl.constexpr, SIZE: tl.constexpr):
    word = PART * SIZE + tl.arange(0, SIZE)
    return tl.load(words + word, mask=(word >= first) & (word < last), other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _below(flags, last, PART: tl.constexpr):
    """Return the flags of words below `last`, and 0 for the others."""
    word = PART * flags.shape[0] + tl.arange(0, flags.shape[0])
    return tl.where(word < last, flags, 0)


@triton.jit
def _number_below(parts, level, last, IS_PLAIN: tl.constexpr):
    """How many bytes of the words below `last` reach the level."""
    flags = _all_reaching(parts, level)
    return _number(
        (
            _below(flags[0], last, 0),
            _below(flags[1], last, 1),
            _below(flags[2], last, 2),
            _below(flags[3], last, 3),
        ),
        IS_PLAIN,
    )


@triton.jit
def _store(target, positions, is_stored, IS_PLAIN: tl.constexpr):
    """Positions, uint32, to where int64 are pointed to. Triton's own store would send pointers and masks through shared
    memory first, in the hope of adjacent ones."""
    if IS_PLAIN:
        tl.store(target, positions.to(tl.int64), mask=is_stored > 0)
    else:
        tl.inline_asm_elementwise(
            "{.reg .pred p; .reg .b64 v; setp.ne.u32 p, $3, 0; cvt.u64.u32 v, $2; @p st.global.b64 [$1], v; "
            "mov.u32 $0, 0;}",
            "=r,l,r,r", [target.to(tl.int64), positions, is_stored], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


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

    words: int32 [rows, WORDS], four levels each, of 7 bits; those beyond the tiles with a candidate may be anything.
    What is no candidate has the level 0, and candidates have others.
    """
    row, _sequence, first, last, asked = span_of_row(begin, end, counts, num_kv_heads, num_positions, width)
    program, programs = tl.program_id(1), tl.num_programs(1)
    taken += row * width
    step = tl.arange(0, STEP)
    # Whole tiles, so that vectors of words are read.
    first_word, last_word = first // (LANES * TILE) * TILE, tl.cdiv(last, LANES * TILE) * TILE
    chunk_words = tl.cdiv(tl.cdiv(last_word - first_word, STEP), programs) * STEP
    chunk_first = first_word + program * chunk_words
    chunk_last = tl.minimum(chunk_first + chunk_words, last_word)
    if (asked > 0) & (chunk_first < chunk_last):
        words += row * WORDS
        # In four parts, whose bytes are added up in the same registers.
        size: tl.constexpr = WORDS // 4
        levels = (
            _load(words, first_word, last_word, 0, size),
            _load(words, first_word, last_word, 1, size),
            _load(words, first_word, last_word, 2, size),
            _load(words, first_word, last_word, 3, size),
        )
        threshold, num_reaching = _threshold(levels, asked, last - first, IS_PLAIN)
        # Of the head's ties, the lowest are left out.
        skip = num_reaching - asked
        above_before = tl.full([], 0, tl.int32)
        ties_before = tl.full([], 0, tl.int32)
        if program > 0:
            above_before = _number_below(levels, threshold + 1, chunk_first, IS_PLAIN)
            ties_before = _number_below(levels, threshold, chunk_first, IS_PLAIN) - above_before
        # The word of which some ties are taken and some are not, and how many are above, and tie, before it.
        split = tl.zeros([STEP], tl.int32)
        above_split = tl.zeros([STEP], tl.int32)
        ties_split = tl.zeros([STEP], tl.int32)
        for start in range(chunk_first, chunk_last, STEP):
            word = start + step
            found = tl.load(words + word, mask=word < chunk_last, other=0).to(tl.uint32, bitcast=True)
            above, reaching = _reaching(found, threshold + 1), _reaching(found, threshold)
            # A byte of 1 for what is above, of 16 for ties; then their numbers, the second in the high half.
            sums = _sum_of_bytes(
                (above >> LEVEL_BITS) | ((reaching ^ above) >> (LEVEL_BITS - 4)),
                tl.zeros([STEP], tl.int32),
                IS_PLAIN,
            )
            number = (sums & 15) | ((sums >> 4) << 16)
            before = tl.cumsum(number, axis=0) - number
            above_here = above_before + (before & 0xFFFF)
            tie = ties_before + (before >> 16)
            is_split = (tie < skip) & (tie + (number >> 16) > skip)
            split = tl.where(is_split, word + 1, split)
            above_split = tl.where(is_split, above_here, above_split)
            ties_split = tl.where(is_split, tie, ties_split)
            chosen = tl.where(is_split, 0, tl.where(tie >= skip, reaching, above))
            rank = above_here + tl.maximum(tie - skip, 0)
            position = word.to(tl.uint32) * LANES
            for lane in tl.static_range(LANES):
                is_taken = (chosen >> (8 * lane + LEVEL_BITS)) & 1
                _store(taken + rank, position + lane, is_taken, IS_PLAIN)
                rank += is_taken.to(tl.int32)
            total = tl.sum(number, axis=0)
            above_before += total & 0xFFFF
            ties_before += total >> 16
        split_word = tl.max(split, axis=0) - 1
        if split_word >= 0:
            lane = tl.arange(0, LANES)
            level = (tl.load(words + split_word) >> (8 * lane)) & 0xFF
            is_above, is_tie = (level > threshold).to(tl.int32), (level == threshold).to(tl.int32)
            tie = tl.max(ties_split, axis=0) + tl.cumsum(is_tie, axis=0) - is_tie
            is_taken = is_above | (is_tie & (tie >= skip).to(tl.int32))
            rank = tl.max(above_split, axis=0) + tl.cumsum(is_taken, axis=0) - is_taken
            tl.store(taken + rank, (split_word * LANES + lane).to(tl.int64), mask=is_taken > 0)
    for start in range(asked + program * STEP, width, programs * STEP):
        tl.store(taken + start + step, tl.full([STEP], -1, tl.int64), mask=start + step < width)
