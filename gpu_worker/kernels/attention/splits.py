"""Into how many splits decode attention cuts the slots of a (sequence, KV head)."""

from __future__ import annotations

from functools import cache

# More than this cost more to join than they bring. A power of two.
MAX_SPLITS = 128
# What registers and shared memory allow; a tile in flight in each of them fills the memory pipe.
PROGRAMS_PER_PROCESSOR = 4
# What a program costs before its first tile has arrived and after its last, in tiles.
START_TILES = 1
# Lengths of rows, each a fourth of an octave below the one before, at which a number of splits is tried.
NUM_LENGTHS = 20


@cache
def num_splits(
    num_rows: int,
    num_tiles: int,
    num_processors: int,
    per_processor: int = PROGRAMS_PER_PROCESSOR,
    may_be_shorter: bool = False,
) -> int:
    """The number of splits with which `num_rows` (lane, KV head) pairs of `num_tiles` tiles each end soonest, the
    fewest of equals. may_be_shorter: of rows with fewer tiles too, which then lose least against their own best number:
    one captured step serves all lengths.

    The host knows all of it without waiting for the device, so that a captured step keeps its grid.
    """

    def time(splits: int, tiles: int) -> int:
        waves = -(-num_rows * splits // (num_processors * per_processor))
        return waves * (-(-tiles // splits) + START_TILES)

    counts = range(1, max(1, min(num_tiles, MAX_SPLITS)) + 1)
    lengths = [
        max(1, round(num_tiles * 2 ** (-step / 4))) for step in range(NUM_LENGTHS if may_be_shorter else 1)
    ]
    shortest = {tiles: min(time(splits, tiles) for splits in counts) for tiles in lengths}
    return min(counts, key=lambda splits: max(time(splits, tiles) / shortest[tiles] for tiles in lengths))
