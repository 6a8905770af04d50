"""The giving side of a move: sealed slabs of a prefix, held while they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kv_store.client.layout import Layout, SlabGeometry
from kv_store.errors import FailedPrecondition, InvalidArgument, Overloaded
from kv_store.prefixes import check_hashes
from kv_store.state import StoreState

CHUNK_BYTES = 1 << 20
MAX_READINGS = 4


def payload_bytes(geometry: SlabGeometry) -> int:
    """Of a slab, from its first byte on: the rows of all heads."""
    return geometry.tokens_per_slab * geometry.layout.token_bytes


class Reading:
    """What a store has of a prefix behind the caller's part: num_found hashes known in all, num_bytes to send.

    Its slabs are not evicted until `close`, which may be called from any thread, and again.
    """

    def __init__(
        self,
        state: StoreState,
        num_found: int,
        slabs: npt.NDArray[np.int32],
        permits: threading.Semaphore,
    ) -> None:
        """slabs: int32 [num_hashes, num_layers], already retained."""
        self._state = state
        self._slabs = slabs.ravel()
        self._permits = permits
        self._payload_bytes = payload_bytes(state.geometry)
        self._is_open = True
        self.num_found = num_found
        self.num_bytes = self._slabs.size * self._payload_bytes

    def chunks(self) -> Iterator[bytes]:
        """The bytes [hash][layer][kv_head][token][K|V]; ends early once closed."""
        data, slab_bytes = self._state.arena.data, self._state.slab_bytes
        for slab in self._slabs.tolist():
            begin = slab * slab_bytes
            for offset in range(begin, begin + self._payload_bytes, CHUNK_BYTES):
                if not self._is_open:
                    return
                yield data[offset : min(offset + CHUNK_BYTES, begin + self._payload_bytes)].tobytes()

    def close(self) -> None:
        with self._state.lock:
            if not self._is_open:
                return
            self._is_open = False
            self._state.allocator.release(self._slabs)
        self._permits.release()


class PrefixSource:
    """Finds prefixes for other stores: by their hashes only, never by listing what there is."""

    def __init__(self, state: StoreState, max_readings: int = MAX_READINGS) -> None:
        self._state = state
        self._permits = threading.BoundedSemaphore(max_readings)

    def open(self, layout: Layout, tokens_per_slab: int, hashes: Sequence[bytes], num_known: int) -> Reading:
        """Hold what is known of the prefix behind its first `num_known` hashes.

        Raises FailedPrecondition for another layout, InvalidArgument, and Overloaded when too many read already.
        """
        check_hashes(hashes)
        if num_known > len(hashes):
            raise InvalidArgument(f"num_known is {num_known} of {len(hashes)} hashes")
        if not self._permits.acquire(blocking=False):
            raise Overloaded("too many prefixes are being read: try again later")
        try:
            with self._state.lock:
                return self._hold(layout, tokens_per_slab, hashes, num_known)
        except BaseException:
            self._permits.release()
            raise

    def _hold(self, layout: Layout, tokens_per_slab: int, hashes: Sequence[bytes], num_known: int) -> Reading:
        state, geometry = self._state, self._state.geometry
        if (layout, tokens_per_slab) != (geometry.layout, geometry.tokens_per_slab):
            raise FailedPrecondition(
                f"this store holds {geometry.layout} in slabs of {geometry.tokens_per_slab} tokens, the other wants "
                f"{layout} in slabs of {tokens_per_slab}: prefixes move between equal layouts only"
            )
        found = state.prefixes.lookup(hashes)
        empty = np.empty((0, layout.num_layers), np.int32)
        slabs = np.stack(found[num_known:]) if len(found) > num_known else empty
        state.allocator.retain(slabs.ravel())
        return Reading(state, len(found), slabs, self._permits)
