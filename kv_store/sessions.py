"""Sessions: names that keep prefix slabs from eviction between two turns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kv_store.errors import NotFound
from kv_store.slabs import SlabAllocator


class SessionDirectory:
    """Holds one reference to each slab of each session until it is dropped or pinned anew."""

    def __init__(self, allocator: SlabAllocator) -> None:
        self._allocator = allocator
        self._slabs: dict[str, npt.NDArray[np.int32]] = {}

    def __len__(self) -> int:
        return len(self._slabs)

    def pin(self, session_id: str, slabs: npt.NDArray[np.int32]) -> None:
        """Let the session hold `slabs` (distinct, sealed) instead of what it held before."""
        self._allocator.retain(slabs)
        earlier = self._slabs.get(session_id)
        self._slabs[session_id] = slabs
        if earlier is not None:
            self._allocator.release(earlier)

    def drop(self, session_id: str) -> None:
        """Raises NotFound."""
        if session_id not in self._slabs:
            raise NotFound(f"no session {session_id!r}")
        self._allocator.release(self._slabs.pop(session_id))

    def clear(self) -> None:
        for session_id in list(self._slabs):
            self.drop(session_id)
