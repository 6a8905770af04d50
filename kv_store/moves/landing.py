"""The taking side's slabs: filled in order, checked where they lie, and seen by nobody until all is there."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from kv_store.client.layout import SlabGeometry
from kv_store.errors import PeerFailed
from kv_store.moves.checksums import Checksums
from kv_store.moves.source import payload_bytes
from kv_store.state import StoreState


class Landing:
    """Writes a stream of `[hash][layer][kv_head][token][K|V]` into slabs that the caller holds."""

    def __init__(self, state: StoreState, geometry: SlabGeometry, slabs: npt.NDArray[np.int32]) -> None:
        """slabs: int32 [num_layers, num_hashes]."""
        self._data = state.arena.data
        self._begins = (slabs.T.ravel().astype(np.int64) * state.slab_bytes).tolist()
        self._payload_bytes = payload_bytes(geometry)
        self._checksums = Checksums()
        self._received = 0
        self.num_bytes = len(self._begins) * self._payload_bytes

    def write(self, data: bytes, checksum: int) -> None:
        """The next chunk. Raises PeerFailed when it is too long or fails its checksum."""
        if not data or len(data) > self.num_bytes - self._received:
            raise PeerFailed(
                f"a chunk of {len(data)} bytes came after {self._received} of {self.num_bytes} bytes"
            )
        source, found = np.frombuffer(data, np.uint8), 0
        while source.size:
            slab, within = divmod(self._received, self._payload_bytes)
            count = min(source.size, self._payload_bytes - within)
            begin = self._begins[slab] + within
            target = self._data[begin : begin + count]
            target[:] = source[:count]
            # Of what lies in the arena: the copy is checked too.
            found = zlib.crc32(target.data, found)
            self._received += count
            source = source[count:]
        if found != checksum:
            raise PeerFailed(f"a chunk fails its checksum before byte {self._received}")
        self._checksums.add(checksum)

    def finish(self, digest: bytes) -> None:
        """Raises PeerFailed unless every byte came, and the digest is that of all chunks."""
        if self._received != self.num_bytes:
            raise PeerFailed(f"{self._received} of {self.num_bytes} bytes came")
        if digest != self._checksums.digest():
            raise PeerFailed("the prefix fails its checksum")
