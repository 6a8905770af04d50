"""Transports that map the arena: rows are read in place, or from a response segment that the store fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import HandoffRefused, StoreError
from kv_store.client.handoff import ArenaHandle, receive_arena
from kv_store.client.indexes import ArrayRef
from kv_store.client.layout import SlabGeometry
from kv_store.client.rpc import StoreRpc
from kv_store.client.slab_tables import RowsWanted, count_rows
from kv_store.client.transports.base import Bytes, Transport
from kv_store.v1 import kv_store_pb2 as pb


class ShmTransport(Transport):
    """Maps the arena; only control goes over gRPC."""

    name = "shm"
    has_response = True

    def __init__(
        self,
        rpc: StoreRpc,
        geometry: SlabGeometry,
        worker_id: str,
        attached: pb.AttachResponse,
        timeout_seconds: float,
    ) -> None:
        super().__init__(rpc, geometry, worker_id, attached, timeout_seconds)
        handle = ArenaHandle(attached.region_id, attached.epoch, attached.arena_bytes)
        if not attached.arena_socket:
            raise HandoffRefused("the store hands out no arena over TCP: use --transport grpc")
        self._arena = receive_arena(attached.arena_socket, handle, timeout_seconds)
        self._rows = geometry.rows(self._arena)
        self._readable = self._arena.view()
        self._readable.flags.writeable = False
        self._row_items = geometry.row_items(self._readable)
        self._response = (attached.response_offset, attached.response_bytes)

    def put(
        self, sequence_id: str, layer: int, slabs: npt.NDArray[np.int32], token_begin: int, rows: Bytes
    ) -> None:
        geometry, done = self._geometry, 0
        while done < rows.shape[1]:
            slab, within = divmod(token_begin + done, geometry.tokens_per_slab)
            count = min(rows.shape[1] - done, geometry.tokens_per_slab - within)
            self._rows[slabs[slab], :, within : within + count] = rows[:, done : done + count]
            done += count

    def gather(
        self, layer: int, wanted: Sequence[RowsWanted], slabs: Sequence[npt.NDArray[np.int32]]
    ) -> Bytes:
        request = self._gather_request(layer, wanted)
        num_rows = count_rows(wanted)
        row_bytes = self._row_bytes
        reply = self._rpc.call(self._rpc.stub.Gather, request, num_rows * row_bytes)
        begin, size = self._response
        if reply.num_rows != num_rows or reply.offset != begin or num_rows * row_bytes > size:
            raise StoreError("the store's reply to Gather does not lie in this worker's response segment")
        end = begin + num_rows * row_bytes
        return self._readable[begin:end].reshape(num_rows, row_bytes)

    def arrays(self, refs: tuple[ArrayRef, ...]) -> Mapping[str, npt.NDArray[Any]]:
        return MappingProxyType({ref.name: self._view(ref) for ref in refs})

    def mapping(self) -> Bytes:
        return self._arena

    def close(self) -> None:
        empty = np.empty(0, np.uint8)
        self._arena, self._rows, self._readable = empty, empty, empty
        self._row_items = self._row_items[:0].copy()

    def _view(self, ref: ArrayRef) -> npt.NDArray[Any]:
        if ref.offset + ref.num_bytes > self._readable.size:
            raise StoreError(f"array {ref.name!r} does not lie within the arena")
        raw = self._readable[ref.offset : ref.offset + ref.num_bytes]
        try:
            return raw.view(ref.dtype).reshape(ref.shape)
        except (TypeError, ValueError) as exc:
            raise StoreError(
                f"array {ref.name!r} has {ref.num_bytes} bytes: it is no {ref.dtype} of {list(ref.shape)}"
            ) from exc


class ZeroCopyTransport(ShmTransport):
    """Shared memory without a response segment: no message is sent for a gather."""

    name = "zero_copy"
    has_response = False

    def gather(
        self, layer: int, wanted: Sequence[RowsWanted], slabs: Sequence[npt.NDArray[np.int32]]
    ) -> Bytes:
        geometry = self._geometry
        rows = np.empty(count_rows(wanted), self._row_items.dtype)
        begin = 0
        for item, table in zip(wanted, slabs, strict=True):
            positions = item.positions
            part = rows[begin : begin + positions.size]
            slab_ids, within = table[positions >> geometry.token_shift], positions & geometry.token_mask
            part[:] = self._row_items[slab_ids, item.kv_head, within]
            begin += positions.size
        return rows.view(np.uint8).reshape(-1, self._row_bytes)
