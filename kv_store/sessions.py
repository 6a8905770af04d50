"""Sessions: names whose prefix slabs are the last to be evicted."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kv_store.slabs import SlabAllocator

MAX_SESSIONS = 4096


class SessionDirectory:
    """Holds one reference to each slab of each session until it is pinned again, or the room is needed.

    counts: int32 [num_slabs], how many sessions hold each slab.
    """

    def __init__(self, allocator: SlabAllocator, max_sessions: int = MAX_SESSIONS) -> None:
        self._allocator = allocator
        self._max_sessions = max_sessions
        # the one that was pinned longest ago first
        self._slabs: OrderedDict[str, npt.NDArray[np.int32]] = OrderedDict()
        self.counts: npt.NDArray[np.int32] = np.zeros(allocator.num_slabs, np.int32)

    def __len__(self) -> int:
        return len(self._slabs)

    def pin(self, session_id: str, slabs: npt.NDArray[np.int32]) -> None:
        """Let the session hold `slabs` (distinct, sealed) instead of what it held before."""
        self._allocator.retain(slabs)
        self.counts[slabs] += 1
        earlier = self._slabs.pop(session_id, None)
        self._slabs[session_id] = slabs
        if earlier is not None:
            self._let_go(earlier)
        if len(self._slabs) > self._max_sessions:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Drop the session that was pinned longest ago; False when there is none."""
        if not self._slabs:
            return False
        self._let_go(self._slabs.popitem(last=False)[1])
        return True

    def clear(self) -> None:
        while self.drop_oldest():
            pass

    def _let_go(self, slabs: npt.NDArray[np.int32]) -> None:
        self.counts[slabs] -= 1
        self._allocator.release(slabs)
