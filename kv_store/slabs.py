"""Slabs: reference counts, owners, and runs of free slabs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int32] | npt.NDArray[np.int64]


class Owners:
    """For whom each of `num_places` slabs was taken. It counts as theirs until it is free, whoever holds it by then.
    Not thread-safe: the store's lock guards it.

    An owner is a caller's name, "" for none: who has one key has one share, whatever it asks.
    """

    def __init__(self, num_places: int) -> None:
        # Of those who have places.
        self._numbers: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._unused_numbers: list[int] = []
        self._number_of: npt.NDArray[np.int32] = np.zeros(num_places, np.int32)

    def take(self, places: Places, owner: str) -> None:
        """These, which were free, are taken for `owner`."""
        if not places.size:
            return
        if owner not in self._numbers:
            unused = self._unused_numbers
            self._numbers[owner] = unused.pop() if unused else len(self._numbers)
            self._counts[owner] = 0
        self._number_of[places] = self._numbers[owner]
        self._counts[owner] += places.size

    def free(self, places: Places) -> None:
        """These are nobody's."""
        counts = np.bincount(self._number_of[places])
        for owner, number in tuple(self._numbers.items()):
            if number < counts.size:
                self._counts[owner] -= int(counts[number])
                if not self._counts[owner]:
                    self._unused_numbers.append(self._numbers.pop(owner))
                    del self._counts[owner]

    def largest_first(self, asking: str | None, num_asked: int) -> list[str]:
        """All who have places, who has the most first; `asking`, None for nobody, as if it had the `num_asked` more
        that it needs."""
        return sorted(self._counts, key=lambda owner: -self._counts[owner] - num_asked * (owner == asking))

    def are_of(self, owner: str, places: Places) -> npt.NDArray[np.bool_]:
        """Return for each of these places, none of them free, whether it is the owner's."""
        return self._number_of[places] == self._numbers[owner]


SlabArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
SlabIds = Sequence[int] | SlabArray
# Which of these slabs may be given up.
Among = Callable[[SlabArray], npt.NDArray[np.bool_]]


class SlabAllocator:
    """Slabs 0..num_slabs-1, each free or held by one holder or more.

    Not thread-safe: the store's lock guards it. An allocated slab has one reference, the caller's; the last
    `release` frees it. A long prompt has thousands, so every call looks at all slabs at once and none at each.

    owners: for whom each slab was allocated.
    """

    def __init__(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs
        self.num_free = num_slabs
        self.owners = Owners(num_slabs)
        self._references = np.zeros(num_slabs, np.int32)

    @property
    def num_used(self) -> int:
        return self.num_slabs - self.num_free

    def longest_run(self, freed: SlabArray) -> int:
        """Most free slabs in a row, if these were free too."""
        is_free = self._references == 0
        is_free[freed] = True
        return int(_runs(is_free)[1].max(initial=0))

    def references(self, slab_ids: SlabIds) -> npt.NDArray[np.int32]:
        return self._references[np.asarray(slab_ids, np.int64)]

    def allocate_run(self, count: int, owner: str = "") -> range | None:
        """`count` slabs in a row for an owner, or None when no free run is that long."""
        start = self._tightest(count)
        if start is None:
            return None
        self._hold(np.arange(start, start + count), owner)
        return range(start, start + count)

    def allocate(
        self, num_rows: int, count: int, after: npt.NDArray[np.int32] | None = None, owner: str = ""
    ) -> npt.NDArray[np.int32]:
        """`count` slabs for each row: int32 [num_rows, count], as many in a row as there are, all of them if they can.

        after: int32 [num_rows], held slabs, no two of them the same, behind which each row's are to lie. The caller has
        checked `num_free`.
        """
        if num_rows * count > self.num_free:
            raise RuntimeError(f"{num_rows * count} slabs wanted, {self.num_free} free")
        table = np.full((num_rows, count), -1, np.int32)
        if after is not None:
            behind = after[:, None] + 1 + np.arange(count)
            is_free = self._references[np.minimum(behind, self.num_slabs - 1)] == 0
            # Held slabs, of which `after` are some, end each row's: no two rows have the same.
            is_taken = np.logical_and.accumulate(is_free & (behind < self.num_slabs), axis=1)
            table[is_taken] = behind[is_taken]
            self._hold(behind[is_taken], owner)
        is_missing = table < 0
        if num_missing := int(is_missing.sum()):
            start = self._tightest(num_missing)
            found = (
                np.flatnonzero(self._references == 0)[:num_missing]
                if start is None
                else np.arange(start, start + num_missing)
            )
            table[is_missing] = found
            self._hold(found, owner)
        return table

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
        freed = ids[self._references[ids] == 0]
        self.num_free += freed.size
        self.owners.free(freed)

    def _hold(self, slab_ids: npt.NDArray[np.int64], owner: str) -> None:
        self.owners.take(slab_ids, owner)
        self._references[slab_ids] = 1
        self.num_free -= slab_ids.size

    def _tightest(self, count: int) -> int | None:
        """Start of the shortest free run of at least `count` slabs; the lowest of equals. None: there is none."""
        starts, lengths = _runs(self._references == 0)
        fitting = np.flatnonzero(lengths >= count)
        return int(starts[fitting[np.argmin(lengths[fitting])]]) if fitting.size else None


def _runs(is_free: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Starts and lengths of all maximal runs."""
    padded = np.zeros(is_free.size + 2, np.int8)
    padded[1:-1] = is_free
    edges = np.flatnonzero(np.diff(padded))
    return edges[::2], edges[1::2] - edges[::2]


def distinct(tables: Iterable[SlabIds]) -> int:
    """How many different slabs occur in these tables."""
    parts = [np.asarray(table, np.int64).ravel() for table in tables]
    return int(np.count_nonzero(np.bincount(np.concatenate(parts)))) if parts else 0
