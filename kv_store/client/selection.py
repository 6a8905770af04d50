"""Selection by the store, for a worker that keeps no index: what is asked, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_store.client.attachment import Attachment
from kv_store.client.errors import StoreError, refusing_odd_fields
from kv_store.client.rpc import MAX_MESSAGE_BYTES
from kv_store.client.slab_tables import TopKWanted
from kv_store.v1 import kv_store_pb2 as pb

Positions = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]


def top_k(
    attached: Attachment, layer: int, wanted: Sequence[TopKWanted], scale: float
) -> tuple[list[Positions], Rows]:
    """See `StoreClient.top_k`. One call, or as many as the messages' size asks for."""
    layout = attached.geometry.layout
    heads, row_bytes = layout.num_kv_heads, layout.row_format.row_bytes
    request = _request(attached.epoch, attached.worker_id, layer, wanted, scale)
    if request.ByteSize() > MAX_MESSAGE_BYTES and len(wanted) > 1:
        half = len(wanted) // 2
        first, second = (top_k(attached, layer, part, scale) for part in (wanted[:half], wanted[half:]))
        return [*first[0], *second[0]], np.concatenate([first[1], second[1]])
    counts = [min(item.k, item.token_end - item.token_begin) for item in wanted]
    most_rows = sum(count for count, item in zip(counts, wanted, strict=True) if item.resident is not None)
    head_bytes = heads * sum(counts) * 4
    with attached.noting_loss():
        data = attached.rpc.read_stream(
            attached.rpc.stub.TopK, request, head_bytes + heads * most_rows * row_bytes
        )
    return _from_bytes(data, [heads * count for count in counts], heads, row_bytes)


def _request(
    epoch: int, worker_id: str, layer: int, wanted: Sequence[TopKWanted], scale: float
) -> pb.TopKRequest:
    """Raises InvalidStoreRequest for a value that no message can carry."""
    with refusing_odd_fields():
        items = [
            pb.TopKItem(
                sequence_id=item.sequence_id,
                token_begin=item.token_begin,
                token_end=item.token_end,
                k=item.k,
                queries=np.ascontiguousarray(item.queries, "<f4").tobytes(),
                resident=None if item.resident is None else np.packbits(item.resident).tobytes(),
            )
            for item in wanted
        ]
        return pb.TopKRequest(epoch=epoch, worker_id=worker_id, layer=layer, scale=scale, items=items)


def _from_bytes(
    data: bytes, sizes: Sequence[int], num_heads: int, row_bytes: int
) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.uint8]]:
    """The reply to TopK: positions int64 [num_heads, n] of items with so many each in all heads, and rows uint8
    [m, row_bytes]. Raises StoreError."""
    head_bytes = 4 * sum(sizes)
    if len(data) < head_bytes or (len(data) - head_bytes) % row_bytes:
        raise StoreError(f"the store's reply to TopK has {len(data)} bytes, and {head_bytes} of positions")
    flat = np.frombuffer(data, "<i4", head_bytes // 4).astype(np.int64)
    positions = [part.reshape(num_heads, -1) for part in np.split(flat, np.cumsum(sizes)[:-1])]
    return positions, np.frombuffer(data, np.uint8, offset=head_bytes).reshape(-1, row_bytes)
