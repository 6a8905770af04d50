"""The last program of `kernel.py`: the threshold of a head, and writing what is taken."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.top_k.programs import (
    FLOOR,
    NEVER,
    NUM_NOTES,
    PEAK,
    SIZE,
    load_keys,
    reached_by,
    row_of,
    search,
    write_tile,
)


@triton.jit
def finish(
    bits,
    counts,
    notes,
    num_above,
    num_equal,
    places,
    listed,
    short_keys,
    short_positions,
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
    SLAB: tl.constexpr,
):
    """A program: one chunk of a head. Of a head whose list is longer than a tile the first does all."""
    row, bits, asked = row_of(bits, counts, num_heads, num_positions, width, batch_stride, head_stride)
    chunk = tl.program_id(1)
    taken += row * width
    listed += row * num_positions
    num_above += row * num_chunks
    num_equal += row * num_chunks
    notes += row * NUM_NOTES
    lane = tl.arange(0, TILE)
    # Volatile, or the compiler has them wait for what tells whether they are needed.
    key = tl.load(short_keys + row * TILE + lane, volatile=True)
    position = tl.load(short_positions + row * TILE + lane, volatile=True)
    own = tl.load(num_above + chunk, volatile=True)
    place = tl.load(places + row * num_chunks + chunk, volatile=True)
    floor = tl.load(notes + FLOOR, volatile=True)
    peak = tl.load(notes + PEAK, volatile=True)
    size = tl.load(notes + SIZE, volatile=True)
    if (size >= asked) & (size <= TILE):
        short_keys += row * TILE + place
        short_positions += row * TILE + place
        slab = tl.arange(0, SLAB)
        own_key = tl.load(short_keys + slab, mask=slab < own, other=NEVER)
        own_position = tl.load(short_positions + slab, mask=slab < own, other=0)
        if chunk == 0:
            tl.store(taken + lane, tl.full([TILE], -1, tl.int64), mask=(lane >= asked) & (lane < width))
        key = tl.where(lane < size, key, NEVER)
        threshold, skip = _short_threshold(key, floor, peak, size, asked)
        is_before = (position < chunk * chunk_size) & (lane < size)
        before = ((key > threshold) & is_before).to(tl.int32)
        before += ((key == threshold) & is_before).to(tl.int32) << 16
        before = tl.sum(before, axis=0)
        above, equal = write_tile(
            taken, own_position, own_key, before & 0xFFFF, before >> 16, threshold, skip
        )
        for start in range(SLAB, own, SLAB):
            entry = start + slab
            own_key = tl.load(short_keys + entry, mask=entry < own, other=NEVER)
            own_position = tl.load(short_positions + entry, mask=entry < own, other=0)
            above, equal = write_tile(taken, own_position, own_key, above, equal, threshold, skip)
    else:
        chunks = tl.arange(0, CHUNKS)
        all_above = tl.load(num_above + chunks, mask=chunks < num_chunks, other=0)
        all_equal = tl.load(num_equal + chunks, mask=chunks < num_chunks, other=0)
        equals = tl.sum(all_equal, axis=0)
        found = tl.minimum(asked, size + equals)
        if chunk == 0:
            tl.store(taken + lane, tl.full([TILE], -1, tl.int64), mask=(lane >= found) & (lane < width))
        if size < asked:
            first = chunk * chunk_size
            last = tl.minimum(first + chunk_size, num_positions)
            above_before = tl.sum(tl.where(chunks < chunk, all_above, 0), axis=0)
            equal_before = tl.sum(tl.where(chunks < chunk, all_equal, 0), axis=0)
            ties = equals - (found - size)
            _write(bits, listed, taken, first, last, above_before, equal_before, floor, ties, False, TILE)
        elif chunk == 0:
            _join(listed, num_above, num_chunks, chunk_size, size, CHUNKS, TILE)
            best, ties, length = _listed_threshold(bits, listed, size, asked, TILE)
            _write(bits, listed, taken, 0, length, 0, 0, best, ties, True, TILE)


@triton.jit
def _short_threshold(keys, floor, peak, size, asked):
    """Threshold of the head among `size` keys that are above the floor, and how many of its equals are too low."""
    low = floor.to(tl.int64) + 1
    # The first guess is that of scores whose number halves with every step up.
    halvings = tl.log2(tl.maximum(size, 1).to(tl.float32) / tl.maximum(asked, 1).to(tl.float32))
    step = (peak - low).to(tl.float32) / (tl.log2(size.to(tl.float32) + 1.0) + 1.0)
    guess = (halvings * step).to(tl.int64)
    threshold, reached = search(keys, low, peak.to(tl.int64), size, asked, 0, low + guess, low + 2 * guess)
    return threshold, reached - asked


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
    IS_LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write what is taken of the list's entries (or the positions) from `first` up to `last`; see `write_tile`."""
    above = tl.full([], 0, tl.int32) + above_before
    equal = tl.full([], 0, tl.int32) + equal_before
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < last
        if IS_LISTED:
            position = tl.load(listed + position, mask=inside, other=0)
        key = load_keys(bits, position, inside)
        above, equal = write_tile(taken, position, key, above, equal, threshold, skip)


@triton.jit
def _join(listed, num_above, num_chunks, chunk_size, size, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """The chunks' lists become one. An entry never moves up, so none is overwritten before it is read."""
    for start in range(0, size, TILE):
        entry = start + tl.arange(0, TILE)
        shift = tl.zeros([TILE], tl.int32)
        before = tl.full([], 0, tl.int32)
        for c in tl.static_range(CHUNKS):
            shift = tl.where(entry >= before, c * chunk_size - before, shift)
            before += tl.load(num_above + c, mask=c < num_chunks, other=0)
        position = tl.load(listed + entry + shift, mask=entry < size, other=0)
        tl.debug_barrier()
        tl.store(listed + entry, position, mask=entry < size)
    tl.debug_barrier()


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
            best = tl.maximum(best, load_keys(bits, position, inside))
        threshold, _ = reached_by(best, asked, 0, TILE)
        above = tl.full([], 0, tl.int32)
        equal = tl.full([], 0, tl.int32)
        for start in range(0, size, TILE):
            inside = start + lane < size
            position = tl.load(listed + start + lane, mask=inside, other=0)
            key = load_keys(bits, position, inside)
            above += tl.sum((key > threshold).to(tl.int32), axis=0)
            equal += tl.sum((key == threshold).to(tl.int32), axis=0)
        skip = equal - (asked - above)
        if above >= asked:
            kept = tl.full([], 0, tl.int32)
            for start in range(0, size, TILE):
                inside = start + lane < size
                position = tl.load(listed + start + lane, mask=inside, other=0)
                is_above = load_keys(bits, position, inside) > threshold
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
        key = load_keys(bits, position, inside)
        threshold, _ = reached_by(key, asked, 0, TILE)
        found = (key > threshold).to(tl.int32) + ((key == threshold).to(tl.int32) << 16)
        total = tl.sum(found, axis=0)
        skip = (total >> 16) - (asked - (total & 0xFFFF))
    return threshold, skip, size
