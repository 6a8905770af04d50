"""The programs of `kernel.py`: columns' maxima, pruning, and the last selection."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

# Keys are int32 in the order of the scores: the magnitude's bits, negated below zero, so that -0.0 and 0.0 tie.
# The key of -inf, and of NaN: never taken.
NEVER = tl.constexpr(-0x7F800000)
MINUS_INF_BITS = tl.constexpr(-0x00800000)


@triton.jit
def _keys(bits, position, inside):
    """Keys of the scores at these positions; NEVER outside."""
    loaded = tl.load(bits + position, mask=inside, other=MINUS_INF_BITS)
    magnitude = loaded & 0x7FFFFFFF
    key = tl.where(loaded < 0, -magnitude, magnitude)
    return tl.where(magnitude > 0x7F800000, NEVER, key)


@triton.jit
def _row_of(bits, counts, num_heads, num_positions, width, batch_stride, head_stride):
    """Number of the row, its scores, and how many of them are asked for."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_heads
    asked = tl.maximum(tl.load(counts + batch), 0)
    asked = tl.minimum(asked, tl.minimum(width, num_positions)).to(tl.int32)
    return row, bits + batch * batch_stride + (row % num_heads) * head_stride, asked


@triton.jit
def _reached_by(keys, asked, spare, TILE: tl.constexpr):
    """The greatest key that `asked` of the keys reach, or a smaller one that at most `asked + spare` of them do."""
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64)
    reached = tl.full([], TILE, tl.int32)
    while (low < high) & (reached > asked + spare):
        middle = low + ((high - low + 1) >> 1)
        reaching = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        enough = reaching >= asked
        low = tl.where(enough, middle, low)
        reached = tl.where(enough, reaching, reached)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _write(
    bits,
    listed,
    taken,
    first,
    last,
    above_before,
    equal_before,
    threshold,
    skip,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write what is taken of the list's entries (or the positions) from `first` up to `last`, at its rank in the row.

    above_before, equal_before: how many of either lie before `first`. skip: of the row's equals, how many are too low
    to be taken.
    """
    above = tl.full([], 0, tl.int32) + above_before
    equal = tl.full([], 0, tl.int32) + equal_before
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < last
        if LISTED:
            position = tl.load(listed + position, mask=inside, other=0)
        key = _keys(bits, position, inside)
        is_above = key > threshold
        is_equal = (key == threshold) & (threshold > NEVER)
        # Both counts in one scan: TILE is at most 2^14.
        found = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        so_far = tl.cumsum(found, axis=0)
        equals_taken = equal + (so_far >> 16) - skip
        rank = above + (so_far & 0xFFFF) + tl.maximum(equals_taken, 0) - 1
        tl.store(taken + rank, position.to(tl.int64), mask=is_above | (is_equal & (equals_taken > 0)))
        total = tl.sum(found, axis=0)
        above += total & 0xFFFF
        equal += total >> 16


@triton.jit
def column_maxima(
    bits,
    maxima,
    num_heads,
    num_positions,
    width,
    batch_stride,
    head_stride,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A program: the best keys of STRIP adjacent columns of one row, DEPTH positions of each at a time."""
    row = tl.program_id(0).to(tl.int64)
    bits += (row // num_heads) * batch_stride + (row % num_heads) * head_stride
    column = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    depth = tl.arange(0, DEPTH)
    best = tl.full([DEPTH, STRIP], NEVER, tl.int32)
    for start in range(0, num_positions, DEPTH * TILE):
        position = start + depth[:, None] * TILE + column[None, :]
        best = tl.maximum(best, _keys(bits, position, position < num_positions))
    tl.store(maxima + row * TILE + column, tl.max(best, axis=0))


@triton.jit
def prune(
    bits,
    counts,
    maxima,
    floors,
    num_above,
    num_equal,
    listed,
    num_heads,
    num_positions,
    width,
    batch_stride,
    head_stride,
    num_chunks,
    chunk_size,
    TILE: tl.constexpr,
):
    """A program: one chunk of one row. What it lists lies at the chunk's own place in `listed` [rows, N]."""
    row, bits, asked = _row_of(bits, counts, num_heads, num_positions, width, batch_stride, head_stride)
    chunk = tl.program_id(1)
    lane = tl.arange(0, TILE)
    # All programs of a row find the same floor. One a little low costs less than finding the best.
    best = tl.load(maxima + row * TILE + lane)
    floor = _reached_by(best, asked, asked // 16 + 16, TILE)
    first = chunk * chunk_size
    last = tl.minimum(first + chunk_size, num_positions)
    listed += row * num_positions + first
    above = tl.full([], 0, tl.int32)
    is_equal = tl.zeros([TILE], tl.int32)
    for start in range(first, last, TILE):
        position = start + lane
        key = _keys(bits, position, position < last)
        is_above = key > floor
        so_far = tl.cumsum(is_above.to(tl.int32), axis=0)
        tl.store(listed + above + so_far - 1, position, mask=is_above)
        above += tl.sum(is_above.to(tl.int32), axis=0)
        is_equal += (key == floor).to(tl.int32)
    if chunk == 0:
        tl.store(floors + row, floor)
    tl.store(num_above + row * num_chunks + chunk, above)
    tl.store(num_equal + row * num_chunks + chunk, tl.where(floor > NEVER, tl.sum(is_equal, axis=0), 0))


@triton.jit
def _listed_threshold(bits, listed, size, asked, TILE: tl.constexpr):
    """Threshold of a list of `size` positions, how many of its equals are too low, and the list's new size.

    A list longer than a tile, which takes scores that follow their columns, is pruned in place until it fits: each
    round at least halves it, give or take a tile.
    """
    lane = tl.arange(0, TILE)
    threshold = tl.full([], NEVER, tl.int32)
    skip = tl.full([], 0, tl.int32)
    is_long = size > TILE
    while is_long:
        best = tl.full([TILE], NEVER, tl.int32)
        for start in range(0, size, TILE):
            inside = start + lane < size
            position = tl.load(listed + start + lane, mask=inside, other=0)
            best = tl.maximum(best, _keys(bits, position, inside))
        threshold = _reached_by(best, asked, 0, TILE)
        above = tl.full([], 0, tl.int32)
        equal = tl.full([], 0, tl.int32)
        for start in range(0, size, TILE):
            inside = start + lane < size
            position = tl.load(listed + start + lane, mask=inside, other=0)
            key = _keys(bits, position, inside)
            above += tl.sum((key > threshold).to(tl.int32), axis=0)
            equal += tl.sum((key == threshold).to(tl.int32), axis=0)
        skip = equal - (asked - above)
        if above >= asked:
            kept = tl.full([], 0, tl.int32)
            for start in range(0, size, TILE):
                inside = start + lane < size
                position = tl.load(listed + start + lane, mask=inside, other=0)
                is_above = _keys(bits, position, inside) > threshold
                so_far = tl.cumsum(is_above.to(tl.int32), axis=0)
                # Everyone has read before anyone overwrites.
                tl.debug_barrier()
                tl.store(listed + kept + so_far - 1, position, mask=is_above)
                kept += tl.sum(is_above.to(tl.int32), axis=0)
            tl.debug_barrier()
            size = above
        is_long = (above >= asked) & (size > TILE)
    if size <= TILE:
        inside = lane < size
        position = tl.load(listed + lane, mask=inside, other=0)
        key = _keys(bits, position, inside)
        threshold = _reached_by(key, asked, 0, TILE)
        found = (key > threshold).to(tl.int32) + ((key == threshold).to(tl.int32) << 16)
        total = tl.sum(found, axis=0)
        skip = (total >> 16) - (asked - (total & 0xFFFF))
    return threshold, skip, size


@triton.jit
def finish(
    bits,
    counts,
    floors,
    num_above,
    num_equal,
    listed,
    taken,
    num_heads,
    num_positions,
    width,
    batch_stride,
    head_stride,
    num_chunks,
    chunk_size,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program: one chunk of a row whose threshold is its floor; of any other row the first does all."""
    row, bits, asked = _row_of(bits, counts, num_heads, num_positions, width, batch_stride, head_stride)
    chunk = tl.program_id(1)
    taken += row * width
    listed += row * num_positions
    num_above += row * num_chunks
    num_equal += row * num_chunks
    lane = tl.arange(0, TILE)
    chunks = tl.arange(0, CHUNKS)
    above = tl.load(num_above + chunks, mask=chunks < num_chunks, other=0)
    equal = tl.load(num_equal + chunks, mask=chunks < num_chunks, other=0)
    size = tl.sum(above, axis=0)
    equals = tl.sum(equal, axis=0)
    found = tl.minimum(asked, size + equals)
    if chunk == 0:
        tl.store(taken + lane, tl.full([TILE], -1, tl.int64), mask=(lane >= found) & (lane < width))
    if size < asked:
        first = chunk * chunk_size
        last = tl.minimum(first + chunk_size, num_positions)
        above_before = tl.sum(tl.where(chunks < chunk, above, 0), axis=0)
        equal_before = tl.sum(tl.where(chunks < chunk, equal, 0), axis=0)
        skip = equals - (found - size)
        floor = tl.load(floors + row)
        _write(bits, listed, taken, first, last, above_before, equal_before, floor, skip, False, TILE)
    elif chunk == 0:
        # The chunks' lists become one. An entry never moves up, so none is overwritten before it is read.
        for start in range(0, size, TILE):
            entry = start + lane
            shift = tl.zeros([TILE], tl.int32)
            before = tl.full([], 0, tl.int32)
            for c in tl.static_range(CHUNKS):
                shift = tl.where(entry >= before, c * chunk_size - before, shift)
                before += tl.load(num_above + c, mask=c < num_chunks, other=0)
            position = tl.load(listed + entry + shift, mask=entry < size, other=0)
            tl.debug_barrier()
            tl.store(listed + entry, position, mask=entry < size)
        tl.debug_barrier()
        threshold, skip, size = _listed_threshold(bits, listed, size, asked, TILE)
        _write(bits, listed, taken, 0, size, 0, 0, threshold, skip, True, TILE)


@triton.jit
def select_in_tile(
    bits, counts, taken, num_heads, num_positions, width, batch_stride, head_stride, TILE: tl.constexpr
):
    """A program: one row of at most TILE scores."""
    row, bits, asked = _row_of(bits, counts, num_heads, num_positions, width, batch_stride, head_stride)
    taken += row * width
    lane = tl.arange(0, TILE)
    key = _keys(bits, lane, lane < num_positions)
    asked = tl.minimum(asked, tl.sum((key > NEVER).to(tl.int32), axis=0))
    threshold = _reached_by(key, asked, 0, TILE)
    above = tl.sum((key > threshold).to(tl.int32), axis=0)
    equal = tl.sum((key == threshold).to(tl.int32), axis=0)
    tl.store(taken + lane, tl.full([TILE], -1, tl.int64), mask=(lane >= asked) & (lane < width))
    _write(bits, bits, taken, 0, num_positions, 0, 0, threshold, equal - (asked - above), False, TILE)
