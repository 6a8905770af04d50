"""Whose room in the arena is whose: who holds the most gives some up first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kv_store.slabs import SlabAllocator, SlabIds


class SlabOwners:
    """For whom each slab was taken: it counts as theirs for as long as anybody holds it.

    An owner is a caller's name, "" for none: who has one key has one share, whatever it asks.
    """

    def __init__(self, allocator: SlabAllocator) -> None:
        self._allocator = allocator
        self._numbers: dict[str, int] = {}
        self._number_of: npt.NDArray[np.int32] = np.zeros(allocator.num_slabs, np.int32)

    def note(self, slab_ids: SlabIds, owner: str) -> None:
        """These were taken for `owner`."""
        self._number_of[np.asarray(slab_ids, np.int64)] = self._numbers.setdefault(owner, len(self._numbers))

    def largest_first(self, asking: str, num_slabs: int) -> list[str]:
        """All who hold slabs, the one with the most first; `asking` as if it had the `num_slabs` more that it needs."""
        held = np.bincount(self._number_of[self._allocator.is_held], minlength=len(self._numbers))
        counts = {owner: int(held[number]) for owner, number in self._numbers.items()}
        holding = [owner for owner, count in counts.items() if count]
        return sorted(holding, key=lambda owner: -counts[owner] - num_slabs * (owner == asking))

    def are_of(self, owner: str) -> npt.NDArray[np.bool_]:
        """[num_slabs], whether each was taken for `owner` last."""
        return self._number_of == self._numbers[owner]
