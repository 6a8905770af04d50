"""The columns on the disk: whose each is, when it was used last, and how many sessions hold it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_store.last_uses import LastUses
from kv_store.owners import Owners

_FIRST_PLACES = 64
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """place: its own among all. before: the name that comes before this in its chain; None: it is the first."""

    name: bytes
    place: int
    before: bytes | None


class ColumnTable:
    """By name; a predecessor in a chain is never older than what follows it. clock: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._columns: dict[bytes, StoredColumn] = {}
        self._at_place: dict[int, StoredColumn] = {}
        self._uses = LastUses(_FIRST_PLACES, clock)
        self.owners = Owners(_FIRST_PLACES)
        # [num_places]
        self._is_taken = np.zeros(_FIRST_PLACES, bool)
        self._num_holders = np.zeros(_FIRST_PLACES, np.int32)
        self._free_places = list(range(_FIRST_PLACES))

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, name: bytes) -> bool:
        return name in self._columns

    def places(self, names: Sequence[bytes]) -> Places:
        """Of those that are here, in their order."""
        found = [self._columns[name].place for name in names if name in self._columns]
        return np.array(found, np.int64)

    def add(self, name: bytes, before: bytes | None, owner: str, idle_seconds: float) -> None:
        """One that is not here yet. idle_seconds: since its last use."""
        if not self._free_places:
            self._grow()
        column = StoredColumn(name, self._free_places.pop(), before)
        self._columns[name] = self._at_place[column.place] = column
        self._is_taken[column.place] = True
        place = np.array([column.place])
        self.owners.take(place, owner)
        self._uses.renew(place, idle_seconds)

    def remove(self, names: Collection[bytes]) -> None:
        """These, which are here."""
        places = [self._columns.pop(name).place for name in names]
        for place in places:
            del self._at_place[place]
        self._is_taken[places] = False
        self._num_holders[places] = 0
        self._free_places += places
        self.owners.free(np.array(places, np.int64))

    def renew(self, names: Sequence[bytes]) -> None:
        """Those of a chain that are here are used now."""
        self._uses.renew(self.places(names))

    def hold(self, names: Sequence[bytes], num_sessions: int = 1) -> None:
        """So many sessions more hold those of these that are here."""
        self._num_holders[self.places(names)] += num_sessions

    def is_held(self, column: StoredColumn) -> bool:
        return bool(self._num_holders[column.place])

    def newest_first(self) -> Iterator[StoredColumn]:
        places = np.flatnonzero(self._is_taken)
        return (self._at_place[each] for each in self._uses.oldest(places, places.size)[::-1].tolist())

    def unheld(self, kept: Sequence[bytes]) -> Places:
        """Of all that no session holds, but for `kept`."""
        may_go = self._is_taken & (self._num_holders == 0)
        may_go[self.places(kept)] = False
        return np.flatnonzero(may_go)

    def are_unused(self, seconds: float, places: Places) -> npt.NDArray[np.bool_]:
        """Whether each was not used within this time."""
        return self._uses.at[places] < self._clock() - seconds

    def oldest(self, places: Places, count: int) -> list[bytes]:
        """The names of so many of these, or of as many as there are, the least recently used first."""
        return [self._at_place[each].name for each in self._uses.oldest(places, count).tolist()]

    def _grow(self) -> None:
        num_places = self._is_taken.size
        self._free_places += range(num_places, 2 * num_places)
        self._is_taken = np.append(self._is_taken, np.zeros_like(self._is_taken))
        self._num_holders = np.append(self._num_holders, np.zeros_like(self._num_holders))
        self._uses.grow(2 * num_places)
        self.owners.grow(2 * num_places)
