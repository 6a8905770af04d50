"""When what takes room was used last: what goes first is found in one look at all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt


class LastUses:
    """The last use of each of the places 0..num_places-1. Not thread-safe: the store's lock guards it.

    There may be thousands of places, so every call works on whole arrays.

    at: float64 [num_places], by the clock.
    """

    def __init__(self, num_places: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.at = np.zeros(num_places)
        # Which of all uses was a place's last: several may be at one time.
        self._turns = np.zeros(num_places, np.int64)
        self._num_uses = 0

    def renew(self, places: npt.NDArray[np.int64]) -> None:
        """These are used now, the first of them last."""
        self._num_uses += places.size
        self._turns[places[::-1]] = np.arange(self._num_uses - places.size, self._num_uses)
        self.at[places] = self._clock()

    def oldest(self, among: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """Return up to `count` of these places, the least recently used first."""
        if count < among.size:
            among = among[np.argpartition(self._turns[among], count)[:count]]
        return among[np.argsort(self._turns[among])]
