"""Keys of scores, and the search for the count-th best of a tile of them."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

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
