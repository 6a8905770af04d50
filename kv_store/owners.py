"""Ownership of memory in the arena: the owner that holds the most is evicted first."""

from __future__ import annotations

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
