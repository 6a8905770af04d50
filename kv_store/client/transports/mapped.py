"""Transports that map the arena: rows are read in place, or from a response segment that the store fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_store.client import wire
from kv_store.client.errors import HandoffRefused, StoreError
from kv_store.client.handoff import ArenaHandle, receive_arena
from kv_store.client.indexes import ArrayRef
from kv_store.client.layout import Layout, SlabGeometry
from kv_store.client.rows import RowsWanted, count_rows
from kv_store.client.rpc import StoreRpc
from kv_store.client.transports.base import Bytes, Transport
from kv_store.v1 import kv_store_pb2 as pb


class ShmTransport(Transport):
    """Maps the arena; only control goes over gRPC."""

    name = "shm"

    @classmethod
    def response_rows(cls, max_gather_rows: int) -> int:
        return max_gather_rows

    def __init__(
        self,
        rpc: StoreRpc,
        layout: Layout,
        worker_id: str,
        attached: pb.AttachResponse,
        timeout_seconds: float,
    ) -> None:
        self._rpc = rpc
        self._epoch = attached.epoch
        self._worker_id = worker_id
        self._geometry = SlabGeometry(layout, attached.slab_bytes)
        handle = ArenaHandle(attached.region_id, attached.epoch, attached.arena_bytes)
        if not attached.arena_socket:
            raise HandoffRefused("the store hands out no arena over TCP: use --transport grpc")
        self._arena = receive_arena(attached.arena_socket, handle, timeout_seconds)
        self._rows = self._geometry.rows(self._arena)
        self._readable = self._arena.view()
        self._readable.flags.writeable = False
        self._response = (attached.response_offset, attached.response_bytes)

    def put(
        self, sequence_id: str, layer: int, slabs: npt.NDArray[np.int32], token_begin: int, rows: Bytes
    ) -> None:
        geometry = self._geometry
        num_tokens = rows.shape[1]
        within = token_begin & geometry.token_mask
        if within + num_tokens <= geometry.tokens_per_slab:
            self._rows[slabs[token_begin >> geometry.token_shift], :, within : within + num_tokens] = rows
            return
        done = 0
        while done < num_tokens:
            slab = (token_begin + done) >> geometry.token_shift
            within = (token_begin + done) & geometry.token_mask
            count = min(num_tokens - done, geometry.tokens_per_slab - within)
            self._rows[slabs[slab], :, within : within + count] = rows[:, done : done + count]
            done += count

    def gather(
        self, layer: int, wanted: Sequence[RowsWanted], slabs: Sequence[npt.NDArray[np.int32]]
    ) -> Bytes:
        request = wire.gather(self._epoch, self._worker_id, layer, wanted)
        num_rows = count_rows(wanted)
        row_bytes = self._geometry.layout.row_format.row_bytes
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

    @classmethod
    def response_rows(cls, max_gather_rows: int) -> int:
        return 0

    def __init__(
        self,
        rpc: StoreRpc,
        layout: Layout,
        worker_id: str,
        attached: pb.AttachResponse,
        timeout_seconds: float,
    ) -> None:
        super().__init__(rpc, layout, worker_id, attached, timeout_seconds)
        self._row_items = self._geometry.row_items(self._readable)

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
        return rows.view(np.uint8).reshape(-1, geometry.layout.row_format.row_bytes)

    def close(self) -> None:
        super().close()
        self._row_items = self._row_items[:0].copy()
