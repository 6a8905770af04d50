"""The programs of `kernel.py` before the last: keys and the search among them, pruning, and a single tile."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

# What is noted of a head: its floor, its best key, how many positions are listed.
FLOOR = tl.constexpr(0)
PEAK = tl.constexpr(1)
SIZE = tl.constexpr(2)
NUM_NOTES = tl.constexpr(3)
# Keys are int32 in the order of the scores: the magnitude's bits, negated below zero, so that -0.0 and 0.0 tie.
# The key of -inf, and of NaN: never taken.
NEVER = tl.constexpr(-0x7F800000)
MINUS_INF_BITS = tl.constexpr(-0x00800000)


@triton.jit
def load_keys(bits, position, inside):
    """Keys of the scores at these positions; NEVER outside."""
    loaded = tl.load(bits + position, mask=inside, other=MINUS_INF_BITS)
    magnitude = loaded & 0x7FFFFFFF
    key = tl.where(loaded < 0, -magnitude, magnitude)
    return tl.where(magnitude > 0x7F800000, NEVER, key)


@triton.jit
def search(keys, low, high, reached, asked, spare, first, second):
    """The greatest key that `asked` of the keys reach, or a smaller one that at most `asked + spare` of them do; and
    how many reach it.

    low, high: int64, the least and the greatest that it may be. reached: how many reach `low`. first, second: int64,
    what to try first. The latency of a round hardly depends on what is counted in it, so it tries two thresholds,
    with one sum for both: a tile has at most 2^14 keys. The next two enclose where the wanted key is likely to lie,
    if those between the bounds are spread evenly (of n, it is off by some sqrt(n) / 2); where a round has not left at
    most half of the keys, they are at the thirds. So scores as they come take some six rounds, and the worst forty.
    """
    beyond = tl.full([], 0, tl.int32)
    while (low < high) & (reached > asked + spare):
        first = tl.minimum(tl.maximum(first, low + 1), high)
        second = tl.minimum(tl.maximum(second, first), high)
        reaches_second = (keys >= second.to(tl.int32)).to(tl.int32)
        total = tl.sum((keys >= first.to(tl.int32)).to(tl.int32) + (reaches_second << 16), axis=0)
        at_first, at_second = total & 0xFFFF, total >> 16
        is_first, is_second = at_first >= asked, at_second >= asked
        number = reached - beyond
        high = tl.where(is_first, tl.where(is_second, high, second - 1), first - 1)
        beyond = tl.where(is_first, tl.where(is_second, beyond, at_second), at_first)
        low = tl.where(is_second, second, tl.where(is_first, first, low))
        reached = tl.where(is_second, at_second, tl.where(is_first, at_first, reached))
        # Nothing is left between where none was asked for.
        between = tl.maximum(reached - beyond, 1)
        span = high + 1 - low
        third = span // 3
        step = span.to(tl.float32) / between.to(tl.float32)
        middle = (reached - asked).to(tl.float32) - 0.5 * spare
        margin = 0.4 * tl.sqrt(between.to(tl.float32))
        is_even = 2 * between <= number
        first = low + tl.where(is_even, (tl.maximum(middle - margin, 0.0) * step).to(tl.int64), third)
        second = low + tl.where(is_even, (tl.maximum(middle + margin, 0.0) * step).to(tl.int64), span - third)
    return low.to(tl.int32), reached


@triton.jit
def reached_by(keys, asked, spare, TILE: tl.constexpr):
    """The same among keys of which nothing is known."""
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64)
    third = (high - low) // 3
    return search(keys, low, high, tl.full([], TILE, tl.int32), asked, spare, low + third, high - third)


@triton.jit
def row_of(bits, counts, num_heads, num_positions, width, batch_stride, head_stride):
    """Number of the head, its scores, and how many of them are asked for."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_heads
    asked = tl.maximum(tl.load(counts + batch), 0)
    asked = tl.minimum(asked, tl.minimum(width, num_positions)).to(tl.int32)
    return row, bits + batch * batch_stride + (row % num_heads) * head_stride, asked


@triton.jit
def write_tile(taken, position, key, above, equal, threshold, skip):
    """Write what is taken of candidates in order of position, at its rank in the head.

    above, equal: how many of either lie before them; returned are those before the next. skip: of the head's equals,
    how many are too low to be taken.
    """
    is_above = key > threshold
    is_equal = (key == threshold) & (threshold > NEVER)
    # Both counts in one scan: a tile has at most 2^14.
    found = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)
    so_far = tl.cumsum(found, axis=0)
    equals_taken = equal + (so_far >> 16) - skip
    rank = above + (so_far & 0xFFFF) + tl.maximum(equals_taken, 0) - 1
    tl.store(taken + rank, position.to(tl.int64), mask=is_above | (is_equal & (equals_taken > 0)))
    total = tl.sum(found, axis=0)
    return above + (total & 0xFFFF), equal + (total >> 16)


@triton.jit
def column_maxima(
    bits,
    maxima,
    notes,
    num_heads,
    num_positions,
    width,
    batch_stride,
    head_stride,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A program: the best keys of STRIP adjacent columns of one head, DEPTH positions of each at a time."""
    row = tl.program_id(0).to(tl.int64)
    bits += (row // num_heads) * batch_stride + (row % num_heads) * head_stride
    column = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    depth = tl.arange(0, DEPTH)
    best = tl.full([DEPTH, STRIP], NEVER, tl.int32)
    for start in range(0, num_positions, DEPTH * TILE):
        position = start + depth[:, None] * TILE + column[None, :]
        best = tl.maximum(best, load_keys(bits, position, position < num_positions))
    tl.store(maxima + row * TILE + column, tl.max(best, axis=0))
    if tl.program_id(1) == 0:
        # `prune` counts up from here.
        tl.store(notes + row * NUM_NOTES + SIZE, 0)


@triton.jit
def prune(
    bits,
    counts,
    maxima,
    notes,
    num_above,
    num_equal,
    places,
    listed,
    short_keys,
    short_positions,
    num_heads,
    num_positions,
    width,
    batch_stride,
    head_stride,
    num_chunks,
    chunk_size,
    TILE: tl.constexpr,
    SLAB: tl.constexpr,
    IS_ONE_TILE: tl.constexpr,
):
    """A program: one chunk of one head. What it lists lies at the chunk's own place in `listed` [rows, N], and as far
    as it fits in the head's short list [rows, TILE], where chunks lie in any order."""
    row, bits, asked = row_of(bits, counts, num_heads, num_positions, width, batch_stride, head_stride)
    chunk = tl.program_id(1)
    lane = tl.arange(0, TILE)
    first = chunk * chunk_size
    last = tl.minimum(first + chunk_size, num_positions)
    if IS_ONE_TILE:
        # On its way while the floor is sought.
        key = load_keys(bits, first + lane, first + lane < last)
    # All programs of a head find the same floor. One a little low costs less than finding the best.
    best = tl.load(maxima + row * TILE + lane)
    floor, _ = reached_by(best, asked, asked // 8 + 16, TILE)
    listed += row * num_positions + first
    short_keys += row * TILE
    short_positions += row * TILE
    if IS_ONE_TILE:
        is_above = key > floor
        found = is_above.to(tl.int32)
        so_far = tl.cumsum(found, axis=0)
        total = tl.sum(found + ((key == floor).to(tl.int32) << 16), axis=0)
        above, equal = total & 0xFFFF, total >> 16
        # Programs come in any order, but what is taken does not depend on it.
        place = tl.atomic_add(notes + row * NUM_NOTES + SIZE, above, sem="relaxed")
        tl.store(listed + so_far - 1, first + lane, mask=is_above)
        entry = place + so_far - 1
        tl.store(short_keys + entry, key, mask=is_above & (entry < TILE))
        tl.store(short_positions + entry, first + lane, mask=is_above & (entry < TILE))
    else:
        above = tl.full([], 0, tl.int32)
        is_equal = tl.zeros([TILE], tl.int32)
        for start in range(first, last, TILE):
            key = load_keys(bits, start + lane, start + lane < last)
            is_above = key > floor
            so_far = tl.cumsum(is_above.to(tl.int32), axis=0)
            tl.store(listed + above + so_far - 1, start + lane, mask=is_above)
            above += tl.sum(is_above.to(tl.int32), axis=0)
            is_equal += (key == floor).to(tl.int32)
        equal = tl.sum(is_equal, axis=0)
        place = tl.atomic_add(notes + row * NUM_NOTES + SIZE, above, sem="relaxed")
        # What was listed is read back by other threads.
        tl.debug_barrier()
        fitting = tl.minimum(above, TILE - place)
        for start in range(0, fitting, SLAB):
            entry = start + tl.arange(0, SLAB)
            position = tl.load(listed + entry, mask=entry < fitting, other=0)
            key = load_keys(bits, position, entry < fitting)
            tl.store(short_keys + place + entry, key, mask=entry < fitting)
            tl.store(short_positions + place + entry, position, mask=entry < fitting)
    if chunk == 0:
        tl.store(notes + row * NUM_NOTES + FLOOR, floor)
        tl.store(notes + row * NUM_NOTES + PEAK, tl.max(best, axis=0))
    own = row * num_chunks + chunk
    tl.store(num_above + own, above)
    tl.store(num_equal + own, tl.where(floor > NEVER, equal, 0))
    tl.store(places + own, place)


@triton.jit
def select_in_tile(
    bits, counts, taken, num_heads, num_positions, width, batch_stride, head_stride, TILE: tl.constexpr
):
    """A program: one head of at most TILE scores."""
    row, bits, asked = row_of(bits, counts, num_heads, num_positions, width, batch_stride, head_stride)
    taken += row * width
    lane = tl.arange(0, TILE)
    key = load_keys(bits, lane, lane < num_positions)
    asked = tl.minimum(asked, tl.sum((key > NEVER).to(tl.int32), axis=0))
    threshold, reached = reached_by(key, asked, 0, TILE)
    tl.store(taken + lane, tl.full([TILE], -1, tl.int64), mask=(lane >= asked) & (lane < width))
    write_tile(taken, lane, key, 0, 0, threshold, reached - asked)
