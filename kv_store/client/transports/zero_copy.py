"""Nothing between: rows are read where they lie, in the mapped arena."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_store.client.layout import Layout
from kv_store.client.rows import RowsWanted, count_rows
from kv_store.client.rpc import StoreRpc
from kv_store.client.transports.base import Bytes
from kv_store.client.transports.shm import ShmTransport
from kv_store.v1 import kv_store_pb2 as pb


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
