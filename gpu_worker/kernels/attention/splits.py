"""Into how many splits decode attention cuts the slots of a (sequence, KV head)."""

from __future__ import annotations

from functools import cache

# More than this cost more to join than they bring. A power of two.
MAX_SPLITS = 128
# What registers and shared memory allow; a tile in flight in each of them fills the memory pipe.
PROGRAMS_PER_PROCESSOR = 4
# What a program costs before its first tile has arrived and after its last, in tiles.
START_TILES = 1


@cache
def num_splits(
    num_rows: int, num_tiles: int, num_processors: int, per_processor: int = PROGRAMS_PER_PROCESSOR
) -> int:
    """The number of splits with which `num_rows` (lane, KV head) pairs of `num_tiles` tiles each end soonest, the
    fewest of equals.

    The host knows all three without waiting for the device, so that a captured step keeps its grid.
    """

    def time(splits: int) -> int:
        waves = -(-num_rows * splits // (num_processors * per_processor))
        return waves * (-(-num_tiles // splits) + START_TILES)

    return min(range(1, max(1, min(num_tiles, MAX_SPLITS)) + 1), key=time)
