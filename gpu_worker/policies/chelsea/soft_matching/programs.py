"""The programs of `kernel.py`: the edges of a chunk, which edges of a head are taken, and the merged chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.attention.programs import dot
from gpu_worker.policies.chelsea.soft_matching import reference

# Cosines from -1 to 1 in the steps of the reference, counted from 0.
STEPS = tl.constexpr(float(reference.STEPS))
NO_COSINE = tl.constexpr(reference.STEPS)
LEVELS = tl.constexpr(2 * reference.STEPS + 1)
LEVELS_TILE = tl.constexpr(4 * reference.STEPS)
# An edge is one number, level * 256 + (255 - partner): the largest is the most similar one, the first where they tie.
PLACES = tl.constexpr(256)
# Added to a small float32 and taken away again, it leaves the nearest whole number, a half to the even one.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit(do_not_specialize=["num_rows", "num_edges"])
def match_chunk(
    keys: tl.tensor,
    edges: tl.tensor,
    histogram: tl.tensor,
    stride_head: tl.tensor,
    stride_row: tl.tensor,
    num_rows: tl.tensor,
    num_edges: tl.tensor,
    width: tl.tensor,
    CHUNK: tl.constexpr,
    HALF: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE_DOT: tl.constexpr,
) -> None:
    """The best edge of every other row of one chunk of one head, int32 [H, A], counted by level: int32 [H, LEVELS]."""
    chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = chunk * CHUNK
    num_here = tl.minimum(num_rows - first, CHUNK)
    pairs = tl.arange(0, HALF)
    is_seeking, is_offered = 2 * pairs < num_here, 2 * pairs + 1 < num_here
    keys += head * stride_head + first.to(tl.int64) * stride_row
    products = tl.zeros([HALF, HALF], tl.float32)
    seeking_squares = tl.zeros([HALF], tl.float32)
    offered_squares = tl.zeros([HALF], tl.float32)
    for first_dim in range(0, width, DIMS):
        dims = first_dim + tl.arange(0, DIMS)
        is_dim = dims < width
        seeking = tl.load(
            keys + 2 * pairs[:, None] * stride_row + dims[None, :],
            mask=is_seeking[:, None] & is_dim[None, :],
            other=0.0,
        )
        offered = tl.load(
            keys + (2 * pairs[None, :] + 1) * stride_row + dims[:, None],
            mask=is_offered[None, :] & is_dim[:, None],
            other=0.0,
        )
        wide_seeking, wide_offered = seeking.to(tl.float32), offered.to(tl.float32)
        seeking_squares += tl.sum(wide_seeking * wide_seeking, axis=1)
        offered_squares += tl.sum(wide_offered * wide_offered, axis=0)
        # Products of 16-bit rows are exact. Of float32 rows they are made of three of TF32, in one sum.
        if keys.dtype.element_ty == tl.float32:
            high_seeking, high_offered = upper_half(seeking), upper_half(offered)
            products = tl.dot(seeking - high_seeking, high_offered, products, input_precision="tf32")
            products = tl.dot(high_seeking, offered - high_offered, products, input_precision="tf32")
            products = tl.dot(high_seeking, high_offered, products, input_precision="tf32")
        else:
            products += dot(seeking, offered, WIDE_DOT)
    ones = tl.full([HALF], 1.0, tl.float32)
    of_seeking = STEPS * tl.div_rn(ones, tl.maximum(tl.sqrt_rn(seeking_squares), 1e-6))
    of_offered = tl.div_rn(ones, tl.maximum(tl.sqrt_rn(offered_squares), 1e-6))
    cosines = products * of_seeking[:, None] * of_offered[None, :]
    # What is no number is alike to nothing.
    cosines = tl.where(cosines == cosines, cosines, -STEPS)
    levels = (tl.minimum(tl.maximum(cosines, -STEPS), STEPS) + ROUNDING) - ROUNDING
    levels = levels.to(tl.int32) + NO_COSINE
    candidates = levels * PLACES + (pairs ^ (PLACES - 1))[None, :]
    best = tl.max(tl.where(is_offered[None, :], candidates, -1), axis=1)
    edge = chunk * ((CHUNK + 1) // 2) + pairs
    is_edge = is_seeking & (edge < num_edges)
    tl.store(edges + head * num_edges + edge, best, mask=is_edge)
    tl.atomic_add(histogram + head * LEVELS + best // PLACES, 1, mask=is_edge, sem="relaxed")


@triton.jit
def upper_half(x: tl.tensor) -> tl.tensor:
    """Round a float32 to the bits that TF32 keeps; the remainder is a float32 of fewer bits."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_edges", "num_chunks", "num_merged"])
def choose_edges(
    edges: tl.tensor,
    histogram: tl.tensor,
    thresholds: tl.tensor,
    skipped: tl.tensor,
    removed: tl.tensor,
    num_edges: tl.tensor,
    num_chunks: tl.tensor,
    num_merged: tl.tensor,
    EACH: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Choose the edges of one head: the level above which all are taken, int32 [H]; for each chunk how many edges at
    that level are not, the first ones, and how many edges the chunks before it take: int32 [H, chunks]. EACH: edges of
    a chunk."""
    head = tl.program_id(0).to(tl.int64)
    levels = tl.arange(0, LEVELS_TILE)
    counts = tl.load(histogram + head * LEVELS + levels, mask=levels < LEVELS, other=0)
    at_least = tl.cumsum(counts, axis=0, reverse=True)
    threshold = tl.max(tl.where(at_least >= num_merged, levels, 0), axis=0)
    # Of the edges at the threshold the last ones are taken, as many as are missing.
    num_skipped = tl.sum(tl.where(levels >= threshold, counts, 0), axis=0) - num_merged
    tl.store(thresholds + head, threshold)
    edges += head * num_edges
    ties_before, removed_before = 0, 0
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        above = tl.zeros([CHUNKS], tl.int32)
        ties = tl.zeros([CHUNKS], tl.int32)
        for begin in range(0, EACH, STEP):
            places = begin + tl.arange(0, STEP)
            edge = chunks[:, None] * EACH + places[None, :]
            is_edge = (places < EACH)[None, :] & (edge < num_edges)
            level = tl.load(edges + edge, mask=is_edge, other=-1) // PLACES
            above += tl.sum((is_edge & (level > threshold)).to(tl.int32), axis=1)
            ties += tl.sum((is_edge & (level == threshold)).to(tl.int32), axis=1)
        left = num_skipped - ties_before - (tl.cumsum(ties, axis=0) - ties)
        skip = tl.minimum(tl.maximum(left, 0), ties)
        taken = above + ties - skip
        is_chunk = chunks < num_chunks
        tl.store(skipped + head * num_chunks + chunks, skip, mask=is_chunk)
        before = removed_before + tl.cumsum(taken, axis=0) - taken
        tl.store(removed + head * num_chunks + chunks, before, mask=is_chunk)
        ties_before += tl.sum(ties, axis=0)
        removed_before += tl.sum(taken, axis=0)


@triton.jit(do_not_specialize=["positions_stride", "degrees_stride", "num_rows", "num_edges", "num_left"])
def merge_chunk(
    positions: tl.tensor,
    degrees: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    edges: tl.tensor,
    thresholds: tl.tensor,
    skipped: tl.tensor,
    removed: tl.tensor,
    new_positions: tl.tensor,
    new_degrees: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    positions_stride: tl.tensor,
    degrees_stride: tl.tensor,
    keys_stride_head: tl.tensor,
    keys_stride_row: tl.tensor,
    values_stride_head: tl.tensor,
    values_stride_row: tl.tensor,
    num_rows: tl.tensor,
    num_edges: tl.tensor,
    num_left: tl.tensor,
    width: tl.tensor,
    CHUNK: tl.constexpr,
    HALF: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE_DOT: tl.constexpr,
) -> None:
    """Some dimensions of what stays of one chunk of one head, in order, behind what stays of the chunks before it."""
    chunk, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    num_here = tl.minimum(num_rows - first, CHUNK)
    pairs = tl.arange(0, HALF)
    sources, targets = first + 2 * pairs, first + 2 * pairs + 1
    is_source, is_target = 2 * pairs < num_here, 2 * pairs + 1 < num_here
    edge = chunk * ((CHUNK + 1) // 2) + pairs
    # A row without a partner has a level below all others.
    found = tl.load(edges + head * num_edges + edge, mask=is_source & (edge < num_edges), other=-PLACES)
    level, partner = found >> 8, (found & (PLACES - 1)) ^ (PLACES - 1)
    threshold = tl.load(thresholds + head)
    of_chunk = head * tl.num_programs(0) + chunk
    is_tie = level == threshold
    is_merged = (level > threshold) | (
        is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) > tl.load(skipped + of_chunk))
    )
    merged_by = tl.cumsum(is_merged.to(tl.int32), axis=0)
    # Rows of the new order: less by all that is merged before.
    before = tl.load(removed + of_chunk)
    new_sources = sources - before - merged_by + is_merged.to(tl.int32)
    new_targets = targets - before - merged_by
    stays = is_source & (is_merged == 0)

    is_into = (partner[None, :] == pairs[:, None]) & is_merged[None, :]
    # By way of float32, as the interpreter takes no truth value for a number of 16 bits.
    into = is_into.to(tl.float32).to(tl.bfloat16)
    source_degrees = tl.load(degrees + head * degrees_stride + sources, mask=is_source, other=0.0)
    target_degrees = tl.load(degrees + head * degrees_stride + targets, mask=is_target, other=1.0)
    # In a column of 16, the narrowest product there is.
    gained = tl.where((tl.arange(0, 16) == 0)[None, :], source_degrees[:, None], 0.0)
    totals = target_degrees + tl.sum(sums_by(into, gained, WIDE_DOT), axis=1)
    # A row into which nothing is merged stays as it is, to the bit.
    own_share, inverse = (
        tl.div_rn(target_degrees, totals),
        tl.div_rn(tl.full([HALF], 1.0, tl.float32), totals),
    )
    if tl.program_id(1) == 0:
        of_head = head * positions_stride
        tl.store(
            new_positions + head * num_left + new_sources,
            tl.load(positions + of_head + sources, mask=stays, other=0),
            mask=stays,
        )
        tl.store(
            new_positions + head * num_left + new_targets,
            tl.load(positions + of_head + targets, mask=is_target, other=0),
            mask=is_target,
        )
        tl.store(new_degrees + head * num_left + new_sources, source_degrees, mask=stays)
        tl.store(new_degrees + head * num_left + new_targets, totals, mask=is_target)

    # Keys in the first half of the grid's second axis, values in the other.
    tiles = tl.num_programs(1) // 2
    dims = tl.program_id(1) % tiles * DIMS + tl.arange(0, DIMS)
    is_dim = (dims < width)[None, :]
    if tl.program_id(1) < tiles:
        old, new, stride = keys + head * keys_stride_head, new_keys, keys_stride_row
    else:
        old, new, stride = values + head * values_stride_head, new_values, values_stride_row
    old += dims[None, :]
    new += head * num_left * width + dims[None, :]
    stays_at, is_target_at = stays[:, None] & is_dim, is_target[:, None] & is_dim
    alone = tl.load(old + sources.to(tl.int64)[:, None] * stride, mask=is_source[:, None] & is_dim, other=0.0)
    tl.store(new + new_sources.to(tl.int64)[:, None] * width, alone, mask=stays_at)
    given = tl.where(is_merged[:, None], alone.to(tl.float32) * source_degrees[:, None], 0.0)
    means = tl.load(old + targets.to(tl.int64)[:, None] * stride, mask=is_target_at, other=0.0).to(tl.float32)
    means = means * own_share[:, None] + sums_by(into, given, WIDE_DOT) * inverse[:, None]
    tl.store(new + new_targets.to(tl.int64)[:, None] * width, means, mask=is_target_at)


@triton.jit
def sums_by(into: tl.tensor, given: tl.tensor, WIDE_DOT: tl.constexpr) -> tl.tensor:
    """Sums of the rows that go into each row. Three parts of 8 bits are all of a float32, and times 0 or 1 exact."""
    high = given.to(tl.bfloat16)
    rest = given - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    if WIDE_DOT:
        sums = dot(into, low, True) + dot(into, middle, True) + dot(into, high, True)
    else:
        sums = tl.dot(into, high, tl.dot(into, middle, tl.dot(into, low)))
    return sums
