"""Rows as chunked messages, for a worker that cannot map the arena."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest, StoreError
from kv_store.client.indexes import ArrayRef
from kv_store.client.slab_tables import RowsWanted, count_rows
from kv_store.client.transports.base import Bytes, Transport
from kv_store.v1 import kv_store_pb2 as pb

_CHUNK_BYTES = 1 << 20


class GrpcStreamTransport(Transport):
    """PutRows and GatherRows: the same bytes as shared memory, slower. Indexes stay in the store."""

    name = "grpc"
    selects_in_store = True

    def put(
        self, sequence_id: str, layer: int, slabs: npt.NDArray[np.int32], token_begin: int, rows: Bytes
    ) -> None:
        first = pb.PutRowsRequest(
            epoch=self._epoch,
            worker_id=self._worker_id,
            sequence_id=sequence_id,
            layer=layer,
            token_begin=token_begin,
            num_tokens=rows.shape[1],
        )

        def messages() -> Iterator[pb.PutRowsRequest]:
            yield first
            data = np.ascontiguousarray(rows).reshape(-1)
            for begin in range(0, data.size, _CHUNK_BYTES):
                yield pb.PutRowsRequest(data=data[begin : begin + _CHUNK_BYTES].tobytes())

        self._rpc.call(self._rpc.stub.PutRows, messages(), rows.nbytes)

    def gather(
        self, layer: int, wanted: Sequence[RowsWanted], slabs: Sequence[npt.NDArray[np.int32]]
    ) -> Bytes:
        request = self._gather_request(layer, wanted)
        num_rows = count_rows(wanted)
        data = self._rpc.read_stream(self._rpc.stub.GatherRows, request, num_rows * self._row_bytes)
        if len(data) != num_rows * self._row_bytes:
            raise StoreError(
                f"{len(data)} bytes came where {num_rows} rows of {self._row_bytes} were expected"
            )
        return np.frombuffer(data, np.uint8).reshape(num_rows, self._row_bytes)

    def arrays(self, refs: tuple[ArrayRef, ...]) -> Mapping[str, npt.NDArray[Any]]:
        return {}

    def mapping(self) -> Bytes:
        raise InvalidStoreRequest(
            "the grpc transport maps no arena: connect with transport 'shm' or 'zero_copy'"
        )

    def close(self) -> None:
        """Nothing is held."""
