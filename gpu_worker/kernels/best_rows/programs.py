"""The programs of `kernel.py`: one for a whole head, and those that share one, count digits and write."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

# Of eight bits each; the second half are the second score's.
NUM_DIGITS = tl.constexpr(8)
NUM_BINS = tl.constexpr(256)
# What is known of a row after a digit: the digits of either score so far, and how many are yet to be taken.
STATE = tl.constexpr(4)
FIRST, SECOND, LEFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# No row has a first score that is less; -inf and NaN have this one.
NEVER = tl.constexpr(0x00800000)
# The least number of 32 bits: what is never taken as a first score, and comes last as a second.
LOWEST = tl.constexpr(-(2**31))
# What changes from prompt to prompt: no program is compiled once more for a number that divides well.
VARYING = ["num_rows", "width"]
# Whose counts are read at a time, of however many a head has.
CHUNKS = tl.constexpr(128)


@triton.jit
def _keys(scores, row, inside):
    """Float32 scores as numbers from 0 to 2^32, in int64 and in the order of the scores; -inf and NaN as NEVER."""
    loaded = tl.load(scores + row, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    magnitude = loaded & 0x7FFFFFFF
    # Negated below zero, so that -0.0 and 0.0 tie.
    key = tl.where(loaded < 0, -magnitude, magnitude).to(tl.int64) + 0x80000000
    return tl.where(inside & (magnitude <= 0x7F800000), key, NEVER)


@triton.jit
def _known(counts, bins, found, width, DIGIT: tl.constexpr, ALL_DIGITS: tl.constexpr):
    """The numbers that the first and the second score begin with, of what is DIGIT digits long together, and how many
    rows that begin so are to be taken; from the state before and the counts of the last digit."""
    head = tl.program_id(0)
    found += head * (ALL_DIGITS + 1) * STATE
    first, second = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    left = tl.full([], 0, tl.int32) + width
    if counts is not None:
        left = tl.minimum(tl.maximum(tl.load(counts + head), 0), width).to(tl.int32)
    if DIGIT > 0:
        values = tl.arange(0, NUM_BINS)
        numbers = tl.load(bins + (head * ALL_DIGITS + DIGIT - 1) * NUM_BINS + values)
        if DIGIT == 1:
            left = tl.minimum(left, tl.sum(numbers, axis=0))
        else:
            before = found + (DIGIT - 1) * STATE
            first = tl.load(before + FIRST).to(tl.uint32, bitcast=True).to(tl.int64)
            second = tl.load(before + SECOND).to(tl.uint32, bitcast=True).to(tl.int64)
            left = tl.load(before + LEFT)
        reach = tl.cumsum(numbers, axis=0, reverse=True)
        # Of none to be taken the digits are the highest, above all scores.
        value = tl.sum((reach >= left).to(tl.int32), axis=0) - 1
        left -= tl.sum(tl.where(values > value, numbers, 0), axis=0)
        if DIGIT <= NUM_DIGITS // 2:
            first = first * NUM_BINS + value
        else:
            second = second * NUM_BINS + value
    if tl.program_id(1) == 0:
        after = found + DIGIT * STATE
        tl.store(after + FIRST, first.to(tl.uint32).to(tl.int32, bitcast=True))
        tl.store(after + SECOND, second.to(tl.uint32).to(tl.int32, bitcast=True))
        tl.store(after + LEFT, left)
    return first, second, left


@triton.jit(do_not_specialize=VARYING)
def count_digit(
    first_scores,
    second_scores,
    counts,
    bins,
    found,
    num_rows,
    width,
    DIGIT: tl.constexpr,
    ALL_DIGITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program: one chunk of one head."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = row < num_rows
    key = _keys(first_scores + head * num_rows, row, inside)
    first, second, _ = _known(counts, bins, found, width, DIGIT, ALL_DIGITS)
    is_counted = inside & (key != NEVER)
    HALF: tl.constexpr = NUM_DIGITS // 2
    if DIGIT < HALF:
        is_counted &= (key >> (8 * (HALF - DIGIT))) == first
        digit = key >> (8 * (HALF - 1 - DIGIT))
    else:
        other = _keys(second_scores + head * num_rows, row, inside)
        is_counted &= (key == first) & ((other >> (8 * (NUM_DIGITS - DIGIT))) == second)
        digit = other >> (8 * (NUM_DIGITS - 1 - DIGIT))
    numbers = tl.histogram((digit & (NUM_BINS - 1)).to(tl.int32), NUM_BINS, mask=is_counted)
    target = bins + (head * ALL_DIGITS + DIGIT) * NUM_BINS + tl.arange(0, NUM_BINS)
    tl.atomic_add(target, numbers, mask=numbers > 0, sem="relaxed")


@triton.jit
def _compare(
    first_scores,
    second_scores,
    counts,
    bins,
    found,
    num_rows,
    width,
    ALL_DIGITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows of this program's chunk, which of them are above the number that is found, which are at it, and how many of
    the head's that are at it are to be taken."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = row < num_rows
    key = _keys(first_scores + head * num_rows, row, inside)
    first, second, left = _known(counts, bins, found, width, ALL_DIGITS, ALL_DIGITS)
    is_above, is_equal = key > first, (key == first) & (key != NEVER)
    if ALL_DIGITS == NUM_DIGITS:
        other = _keys(second_scores + head * num_rows, row, inside)
        is_above |= is_equal & (other > second)
        is_equal &= other == second
    return row, inside & is_above, inside & is_equal, left


@triton.jit(do_not_specialize=VARYING)
def tally(
    first_scores,
    second_scores,
    counts,
    bins,
    found,
    num_rows,
    width,
    in_chunks,
    ALL_DIGITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program: one chunk of one head."""
    _, is_above, is_equal, _ = _compare(
        first_scores, second_scores, counts, bins, found, num_rows, width, ALL_DIGITS, TILE
    )
    num_chunks = tl.num_programs(1)
    own = in_chunks + tl.program_id(0) * 2 * num_chunks + tl.program_id(1)
    tl.store(own, tl.sum(is_above.to(tl.int32), axis=0))
    tl.store(own + num_chunks, tl.sum(is_equal.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=VARYING)
def write_best(
    first_scores,
    second_scores,
    counts,
    bins,
    found,
    num_rows,
    width,
    in_chunks,
    best,
    ALL_DIGITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program: one chunk of one head; the first pads the head, too."""
    row, is_above, is_equal, left = _compare(
        first_scores, second_scores, counts, bins, found, num_rows, width, ALL_DIGITS, TILE
    )
    head, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    # of all chunks, and of those before this one
    all_above, all_equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    above, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in range(0, num_chunks, CHUNKS):
        chunks = begin + tl.arange(0, CHUNKS)
        of_head = in_chunks + head * 2 * num_chunks + chunks
        in_above = tl.load(of_head, mask=chunks < num_chunks, other=0)
        in_equal = tl.load(of_head + num_chunks, mask=chunks < num_chunks, other=0)
        all_above += tl.sum(in_above, axis=0)
        all_equal += tl.sum(in_equal, axis=0)
        above += tl.sum(tl.where(chunks < chunk, in_above, 0), axis=0)
        equal += tl.sum(tl.where(chunks < chunk, in_equal, 0), axis=0)
    skipped = all_equal - left
    best += head * width
    if chunk == 0:
        for start in range(all_above + left, width, TILE):
            place = start + tl.arange(0, TILE)
            tl.store(best + place, tl.full([TILE], -1, tl.int64), mask=place < width)
    # One scan counts both: a tile has fewer than 2^15 rows.
    so_far = tl.cumsum(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16), axis=0)
    equals_taken = tl.maximum(equal + (so_far >> 16) - skipped, 0)
    place = above + (so_far & 0xFFFF) + equals_taken - 1
    # Equals before the first that is taken count for nothing.
    is_taken = is_above | (is_equal & (equal + (so_far >> 16) > skipped))
    tl.store(best + place, row.to(tl.int64), mask=is_taken & (place < width))


@triton.jit
def _signed(scores, row, inside):
    """Float32 scores as int32 in their order, -0.0 and 0.0 alike; -inf, NaN and what is outside as LOWEST."""
    loaded = tl.load(scores + row, mask=inside, other=float("-inf")).to(tl.int32, bitcast=True)
    magnitude = loaded & 0x7FFFFFFF
    key = tl.where(loaded < 0, -magnitude, magnitude)
    return tl.where((magnitude <= 0x7F800000) & (key != -0x7F800000), key, LOWEST)


@triton.jit
def _search(
    first_scores, second_scores, first, wanted, num_rows, IS_SECOND: tl.constexpr, TILE: tl.constexpr
):
    """The greatest number that `wanted` scores reach, LOWEST if none is; how many are above it, and how many reach it.
    Two bits a round. IS_SECOND: of the second scores, where the first ones are `first`."""
    found = tl.full([], LOWEST, tl.int32)
    above, reach = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + num_rows
    for turn in range(16):
        step = tl.full([], 1, tl.int32) << (30 - 2 * turn)
        low, middle, high = found + step, found + step + step, found + step + step + step
        of_low, of_middle = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
        of_high = tl.zeros([TILE], tl.int32)
        for begin in range(0, num_rows, TILE):
            row = begin + tl.arange(0, TILE)
            inside = row < num_rows
            key = _signed(first_scores, row, inside)
            if IS_SECOND:
                key = tl.where(key == first, _signed(second_scores, row, inside), LOWEST)
            of_low += (key >= low).to(tl.int32)
            of_middle += (key >= middle).to(tl.int32)
            of_high += (key >= high).to(tl.int32)
        num_low, num_middle, num_high = tl.sum(of_low), tl.sum(of_middle), tl.sum(of_high)
        if num_high >= wanted:
            found, reach = high, num_high
        elif num_middle >= wanted:
            found, reach, above = middle, num_middle, num_high
        elif num_low >= wanted:
            found, reach, above = low, num_low, num_middle
        else:
            above = num_low
    return found, above, reach


@triton.jit(do_not_specialize=VARYING)
def take_best(
    first_scores,
    second_scores,
    counts,
    best,
    num_rows,
    width,
    TILE: tl.constexpr,
):
    """A program: one head."""
    head = tl.program_id(0).to(tl.int64)
    first_scores += head * num_rows
    best += head * width
    wanted = tl.full([], 0, tl.int32) + width
    if counts is not None:
        wanted = tl.minimum(tl.maximum(tl.load(counts + head), 0), width).to(tl.int32)
    first, above, reach = _search(first_scores, first_scores, 0, wanted, num_rows, False, TILE)
    # Of those at the number, or at both numbers, the lowest rows are left out.
    skipped = tl.where(first == LOWEST, 0, reach - wanted)
    second = tl.full([], LOWEST, tl.int32)
    if second_scores is not None:
        second_scores += head * num_rows
        if skipped > 0:
            left = wanted - above
            second, above, reach = _search(first_scores, second_scores, first, left, num_rows, True, TILE)
            # All of the ties' second scores reach LOWEST.
            reach = tl.where(second == LOWEST, skipped + left, reach)
            skipped = reach - left
    num_taken, num_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in range(0, num_rows, TILE):
        row = begin + tl.arange(0, TILE)
        inside = row < num_rows
        key = _signed(first_scores, row, inside)
        is_above, is_tie = key > first, (key == first) & (key != LOWEST)
        if second_scores is not None:
            other = _signed(second_scores, row, inside)
            is_above |= is_tie & (other > second)
            is_tie &= other == second
        # One scan counts both: a tile has fewer than 2^15 rows.
        so_far = tl.cumsum(is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16), axis=0)
        tie = num_ties + (so_far >> 16)
        is_taken = is_above | (is_tie & (tie > skipped))
        place = (
            num_taken + (so_far & 0xFFFF) + tl.maximum(tie - skipped, 0) - tl.maximum(num_ties - skipped, 0)
        )
        tl.store(best + place - 1, row.to(tl.int64), mask=is_taken)
        num_taken += tl.sum(is_taken.to(tl.int32))
        num_ties += tl.sum(is_tie.to(tl.int32))
    for begin in range(num_taken, width, TILE):
        place = begin + tl.arange(0, TILE)
        tl.store(best + place, tl.full([TILE], -1, tl.int64), mask=place < width)
