"""Checksums of the slabs that are listed for reuse: taken by idle cores, compared before others trust them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from carrel.process.ready_threads import NoThreads, ReadyThreads

# Slabs that one task takes: some tenths of a millisecond each.
_AT_ONCE = 32


def checksums(slabs: Iterable[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint64]:
    """Return the 64-bit XXH3 of each slab, contiguous uint8 [n]. It releases Python's lock."""
    return np.fromiter((xxh3_64_intdigest(slab.data) for slab in slabs), np.uint64)


class SlabChecksums:
    """Thread-safe. Holds no slab: room that is needed at once is not kept for a sum. Raises NoThreads.

    arena: uint8 [num_slabs * slab_bytes]. num_threads: that compare; one more takes the sums of new slabs.
    """

    def __init__(
        self,
        arena: npt.NDArray[np.uint8],
        slab_bytes: int,
        num_threads: int,
    ) -> None:
        self._slabs = arena.reshape(-1, slab_bytes)
        self._lock = threading.Lock()
        self._sums = np.zeros(len(self._slabs), np.uint64)
        # Whose sum is of what they held when they were sealed last, and how often that was.
        self._is_known = np.zeros(len(self._slabs), bool)
        self._times_sealed = np.zeros(len(self._slabs), np.int64)
        self._sealing = ReadyThreads(1, "slab-checksum")
        try:
            self._comparing = ReadyThreads(num_threads, "slab-compare")
        except NoThreads:
            self._sealing.shutdown()
            raise

    def seal(self, slab_ids: npt.NDArray[np.int32]) -> None:
        """Take the sums of immutable slabs, distinct, soon; of those that are freed meanwhile nothing is known."""
        if not slab_ids.size:
            return
        with self._lock:
            self._is_known[slab_ids] = False
            self._times_sealed[slab_ids] += 1
            times = self._times_sealed[slab_ids]
        self._sealing.submit(self._take, slab_ids, times)

    def find_corrupt(self, slab_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return which of these held slabs changed after their sums were taken. Waits for idle cores."""
        known = slab_ids[self._is_known[slab_ids]]
        parts = [known[begin : begin + _AT_ONCE] for begin in range(0, known.size, _AT_ONCE)]
        found = list(self._comparing.map(self._differing, parts))
        return np.concatenate([np.empty(0, np.int32), *found])

    def sums(self, slab_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64] | None:
        """Return the sums of these listed slabs; None while any of them is missing."""
        with self._lock:
            return self._sums[slab_ids] if self._is_known[slab_ids].all() else None

    def settle(self) -> None:
        """Wait until the sums are taken of all that was sealed by now."""
        last: Future[None] = self._sealing.submit(lambda: None)
        last.result()

    def close(self) -> None:
        """Take and compare no more; before the arena goes."""
        self._sealing.shutdown(cancel_futures=True)
        self._comparing.shutdown(cancel_futures=True)
        self._slabs = self._slabs[:0]

    def _take(self, slab_ids: npt.NDArray[np.int32], times: npt.NDArray[np.int64]) -> None:
        sums = self._sums_of(slab_ids)
        with self._lock:
            is_same = self._times_sealed[slab_ids] == times
            self._sums[slab_ids[is_same]] = sums[is_same]
            self._is_known[slab_ids[is_same]] = True

    def _differing(self, slab_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return slab_ids[self._sums_of(slab_ids) != self._sums[slab_ids]]

    def _sums_of(self, slab_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        return checksums(self._slabs[slab] for slab in slab_ids.tolist())
