"""The programs of `kernel.py`: what may be taken is marked, and the positions that the marks name are written in order.

A mark is of 8 positions, an int16: bit 2p says whether the p-th is eligible, bit 2p + 1 whether it is tied. A tile's
tally is how many are eligible, and in the high half how many are tied. Of a head's ties the lowest are left out.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.spans import span_of_row

ABSENT = tl.constexpr(-1)
LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _pair_keys(query, codebooks, counts, scale, group, ksub, dsub, KSUB: tl.constexpr, WIDTH: tl.constexpr):
    """Keys [KSUB, KSUB], in the order of the weights, of all pairs of codes; ABSENT where no candidate has the pair.

    The bits of a float that is not negative are in its own order.
    """
    code, dim = tl.arange(0, KSUB), tl.arange(0, WIDTH)
    places = code[:, None] * dsub + dim[None, :]
    is_used = (code < ksub)[:, None] & (dim < dsub)[None, :]
    first_book = tl.load(codebooks + places, mask=is_used, other=0.0)
    second_book = tl.load(codebooks + ksub * dsub + places, mask=is_used, other=0.0)
    weights = tl.zeros([KSUB, KSUB], tl.float32)
    for head in range(group):
        part = query + head * 2 * dsub + dim
        first_vector = tl.load(part, mask=dim < dsub, other=0.0).to(tl.float32) * scale
        second_vector = tl.load(part + dsub, mask=dim < dsub, other=0.0).to(tl.float32) * scale
        firsts = tl.sum(first_book * first_vector[None, :], axis=1)
        seconds = tl.sum(second_book * second_vector[None, :], axis=1)
        scores = tl.where(counts > 0, firsts[:, None] + seconds[None, :], float("-inf"))
        # Flat in this order they stay where they are; a reduction of both axes would reorder them in shared memory.
        exponentials = tl.exp2(scores - tl.max(tl.reshape(scores, [KSUB * KSUB]), axis=0))
        total = tl.sum(tl.reshape(exponentials * counts.to(tl.float32), [KSUB * KSUB]), axis=0)
        weights += exponentials * (1.0 / total)
    return tl.where(counts > 0, weights.to(tl.int32, bitcast=True), ABSENT)


@triton.jit
def _threshold(keys, counts, asked, PAIRS: tl.constexpr, COUNT_BITS: tl.constexpr):
    """The greatest key that pairs of at least `asked` candidates reach; the least of all where none is."""
    # One sum of both: candidates, and above their COUNT_BITS the pairs.
    tally = counts.to(tl.int32 if COUNT_BITS < 32 else tl.int64) + (1 << COUNT_BITS)
    low = tl.min(tl.where(keys > ABSENT, keys, LARGEST), axis=0)
    high = tl.max(keys, axis=0)
    pairs_from_low = tl.full([], PAIRS, tally.dtype)
    pairs_above_high = tl.full([], 0, tally.dtype)
    # Where one pair lies between, it is the one.
    while (low < high) & (pairs_from_low - pairs_above_high > 1):
        middle = low + ((high - low + 1) >> 1)
        reaching = tl.sum(tl.where(keys >= middle, tally, 0), axis=0)
        pairs = reaching >> COUNT_BITS
        is_enough = reaching - (pairs << COUNT_BITS) >= asked
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
        pairs_from_low = tl.where(is_enough, pairs, pairs_from_low)
        pairs_above_high = tl.where(is_enough, pairs_above_high, pairs)
    return tl.min(tl.where(keys >= low, keys, LARGEST), axis=0)


@triton.jit(
    do_not_specialize=["num_positions", "num_tiles"],
    do_not_specialize_on_alignment=["seats", "begin", "end", "counts"],
)
def mark_chunk(
    query, codebooks, codes, pair_counts, seats, begin, end, counts, marks, tallies,
    num_kv_heads, num_positions, width, num_tiles, scale, group, ksub, dsub,
    book_stride_seat, book_stride_head, code_stride_seat, code_stride_head, count_stride_seat, count_stride_head,
    KSUB: tl.constexpr, WIDTH: tl.constexpr, COUNT_BITS: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Marks of one chunk, which is the program's share of the head's tiles with a candidate, and each tile's tally.

    marks: int16 [rows, num_tiles, TILE / 8]. tallies: int32 [rows, num_tiles].
    """
    row, sequence, first, last, asked = span_of_row(begin, end, counts, num_kv_heads, num_positions, width)
    chunk_tiles = tl.cdiv(tl.cdiv(last, TILE) - first // TILE, tl.num_programs(1))
    chunk_first = (first // TILE + tl.program_id(1) * chunk_tiles) * TILE
    chunk_last = tl.minimum(chunk_first + chunk_tiles * TILE, last)
    if (asked == 0) | (chunk_first >= chunk_last):
        return
    seat, head = tl.load(seats + sequence), row % num_kv_heads
    codes += seat * code_stride_seat + head * code_stride_head
    lane = tl.arange(0, TILE)
    # Codes are read in vectors, of which the mask takes all or nothing; the first while pairs are weighed.
    readable = tl.cdiv(chunk_last, ALIGN) * ALIGN
    coming = tl.load(codes + chunk_first + lane, mask=chunk_first + lane < readable, other=0)

    code = tl.arange(0, KSUB)
    occurring = tl.load(
        pair_counts
        + seat * count_stride_seat
        + head * count_stride_head
        + code[:, None] * ksub
        + code[None, :],
        mask=(code < ksub)[:, None] & (code < ksub)[None, :],
        other=0,
    )
    keys = _pair_keys(
        query + row * group * 2 * dsub, codebooks + seat * book_stride_seat + head * book_stride_head, occurring,
        scale, group, ksub, dsub, KSUB, WIDTH,
    )  # fmt: skip
    keys, occurring = tl.reshape(keys, [KSUB * KSUB]), tl.reshape(occurring, [KSUB * KSUB])
    threshold = _threshold(keys, occurring, asked, KSUB * KSUB, COUNT_BITS)
    classes = tl.where(keys > threshold, 1, tl.where(keys == threshold, 3, 0)).to(tl.int8)

    marks += row * num_tiles * (TILE // 8)
    tallies += row * num_tiles
    eight, byte = tl.arange(0, 8), tl.arange(0, TILE // 8)
    for start in range(chunk_first, chunk_last, TILE):
        codes_here = coming.to(tl.int32)
        coming = tl.load(codes + start + TILE + lane, mask=start + TILE + lane < readable, other=0)
        # What is no candidate may hold any byte.
        pair = (codes_here & (KSUB - 1)) * KSUB + ((codes_here >> 8) & (KSUB - 1))
        found = tl.reshape(tl.gather(classes, pair, 0).to(tl.int32), [TILE // 8, 8])
        mark = tl.sum(found << (2 * eight)[None, :], axis=1)
        mark &= _positions_below(chunk_last - start - 8 * byte) & ~_positions_below(first - start - 8 * byte)
        tl.store(marks + start // 8 + byte, mark.to(tl.int16))
        tl.store(tallies + start // TILE, tl.sum(tally_of(mark), axis=0))


@triton.jit
def _positions_below(number):
    """The bits of the first `number` of a mark's 8 positions."""
    return (1 << (2 * tl.minimum(tl.maximum(number, 0), 8))) - 1


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
