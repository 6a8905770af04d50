"""Transport of bytes between a worker and the store; control is the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kv_store.client import wire
from kv_store.client.indexes import ArrayRef
from kv_store.client.layout import SlabGeometry
from kv_store.client.rpc import StoreRpc
from kv_store.client.slab_tables import RowsWanted
from kv_store.v1 import kv_store_pb2 as pb

Bytes = npt.NDArray[np.uint8]


class Transport(ABC):
    """Bytes of one attachment; of no use after the epoch has changed."""

    name: ClassVar[str]
    # The store fills a segment of the arena with the rows of a gather.
    has_response: ClassVar[bool] = False
    # The arena is not mapped here: indexes stay in the store, which selects.
    selects_in_store: ClassVar[bool] = False

    def __init__(
        self,
        rpc: StoreRpc,
        geometry: SlabGeometry,
        worker_id: str,
        attached: pb.AttachResponse,
        timeout_seconds: float,
    ) -> None:
        """attached: the store's reply to Attach. timeout_seconds: to get at the arena."""
        self._rpc = rpc
        self._geometry = geometry
        self._row_bytes = geometry.layout.row_format.row_bytes
        self._worker_id = worker_id
        self._epoch = attached.epoch

    @abstractmethod
    def put(
        self, sequence_id: str, layer: int, slabs: npt.NDArray[np.int32], token_begin: int, rows: Bytes
    ) -> None:
        """Write rows uint8 [num_kv_heads, num_tokens, row_bytes]; `slabs` is the layer's checked slab table."""

    @abstractmethod
    def gather(
        self, layer: int, wanted: Sequence[RowsWanted], slabs: Sequence[npt.NDArray[np.int32]]
    ) -> Bytes:
        """Return the rows asked for, checked: uint8 [num_rows, row_bytes], valid until the next gather.

        slabs: of each item, its sequence's slab table of the layer.
        """

    @abstractmethod
    def arrays(self, refs: tuple[ArrayRef, ...]) -> Mapping[str, npt.NDArray[Any]]:
        """Return an index's arrays, read-only; none where indexes stay in the store."""

    @abstractmethod
    def mapping(self) -> Bytes:
        """Return the whole arena: uint8 [arena_bytes]. Raises InvalidStoreRequest when this transport maps nothing."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the arena; arrays handed out keep their bytes mapped."""

    def _gather_request(self, layer: int, wanted: Sequence[RowsWanted]) -> pb.GatherRequest:
        return wire.gather(self._epoch, self._worker_id, layer, wanted)
