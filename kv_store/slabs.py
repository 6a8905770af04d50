"""Slabs: reference counts, sealed marks and runs of free slabs."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

SlabIds = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]


class FreeRuns:
    """Maximal runs of free slabs, sorted by start."""

    def __init__(self, num_slabs: int) -> None:
        self._starts = [0]
        self._lengths = {0: num_slabs}

    def longest(self) -> int:
        return max(self._lengths.values(), default=0)

    def length_at(self, start: int) -> int:
        """Length of the run that begins at `start`, or 0."""
        return self._lengths.get(start, 0)

    def best_fit(self, count: int) -> int | None:
        """Start of the shortest run of at least `count` slabs; the lowest of equals."""
        fitting = [(length, start) for start, length in self._lengths.items() if length >= count]
        return min(fitting)[1] if fitting else None

    def longest_start(self) -> int:
        return max(self._lengths, key=lambda start: (self._lengths[start], -start))

    def take(self, start: int, count: int) -> range:
        """Cut `count` slabs off the front of the run at `start`."""
        length = self._lengths.pop(start)
        at = bisect.bisect_left(self._starts, start)
        if count == length:
            del self._starts[at]
        else:
            self._starts[at] = start + count
            self._lengths[start + count] = length - count
        return range(start, start + count)

    def give(self, start: int, count: int) -> None:
        """Return slabs and merge them with their free neighbours."""
        at = bisect.bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + count:
            count += self._lengths.pop(self._starts.pop(at))
        if at > 0 and (before := self._starts[at - 1]) + self._lengths[before] == start:
            self._lengths[before] += count
            return
        self._starts.insert(at, start)
        self._lengths[start] = count


class SlabAllocator:
    """Slabs 0..num_slabs-1, each free or held by one holder or more.

    Not thread-safe: the store's lock guards it. An allocated slab has one reference, the caller's; the last
    `release` frees it.
    """

    def __init__(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs
        self.num_free = num_slabs
        self._references = np.zeros(num_slabs, np.int32)
        self._runs = FreeRuns(num_slabs)

    @property
    def num_used(self) -> int:
        return self.num_slabs - self.num_free

    @property
    def longest_run(self) -> int:
        return self._runs.longest()

    def references(self, slab_ids: SlabIds) -> npt.NDArray[np.int32]:
        return self._references[np.asarray(slab_ids, np.int64)]

    def allocate_run(self, count: int) -> range | None:
        """`count` slabs in a row, or None when no free run is that long."""
        start = self._runs.best_fit(count)
        return None if start is None else self._hold(self._runs.take(start, count))

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` slabs, in a row right behind slab `after` if these are free, else in as few runs as possible.

        The caller has checked `num_free`.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} slabs wanted, {self.num_free} free")
        taken: list[int] = []
        if after is not None and (room := self._runs.length_at(after + 1)):
            taken += self._hold(self._runs.take(after + 1, min(count, room)))
        while (missing := count - len(taken)) > 0:
            start = self._runs.best_fit(missing)
            if start is None:
                start = self._runs.longest_start()
            taken += self._hold(self._runs.take(start, min(missing, self._runs.length_at(start))))
        return taken

    def retain(self, slab_ids: SlabIds) -> None:
        """One more reference to each of these distinct, held slabs."""
        ids = np.asarray(slab_ids, np.int64)
        if ids.size and self._references[ids].min() < 1:
            raise RuntimeError("a free slab cannot be retained")
        self._references[ids] += 1

    def release(self, slab_ids: SlabIds) -> None:
        """One reference less to each of these distinct slabs; those without any are free at once."""
        ids = np.asarray(slab_ids, np.int64)
        if ids.size and self._references[ids].min() < 1:
            raise RuntimeError("a slab was released more often than it was held")
        self._references[ids] -= 1
        freed = np.sort(ids[self._references[ids] == 0])
        if not freed.size:
            return
        self.num_free += freed.size
        for run in np.split(freed, np.flatnonzero(np.diff(freed) != 1) + 1):
            self._runs.give(int(run[0]), run.size)

    def _hold(self, slab_ids: range) -> range:
        self._references[slab_ids.start : slab_ids.stop] = 1
        self.num_free -= len(slab_ids)
        return slab_ids


def distinct(tables: Iterable[SlabIds]) -> int:
    """How many different slabs occur in these tables."""
    parts = [np.asarray(table, np.int64).ravel() for table in tables]
    return int(np.unique(np.concatenate(parts)).size) if parts else 0
