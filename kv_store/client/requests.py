"""The larger requests, from records to messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kv_store.client import wire
from kv_store.client.errors import refusing_odd_fields
from kv_store.client.indexes import IndexParams
from kv_store.client.rows import RowsWanted, TopKWanted
from kv_store.v1 import kv_store_pb2 as pb


def build_index(params: IndexParams, **fields: object) -> pb.BuildIndexRequest:
    """Raises InvalidStoreRequest for a value that no message can carry."""
    with refusing_odd_fields():
        request = pb.BuildIndexRequest(**fields)  # type: ignore[arg-type]
    wire.set_params(request, params)
    return request


def gather(epoch: int, worker_id: str, layer: int, wanted: Sequence[RowsWanted]) -> pb.GatherRequest:
    """Raises InvalidStoreRequest for a value that no message can carry."""
    with refusing_odd_fields():
        items = [
            pb.GatherItem(
                sequence_id=item.sequence_id,
                layer=layer,
                kv_head=item.kv_head,
                positions=item.positions.tolist(),
            )
            for item in wanted
        ]
        return pb.GatherRequest(epoch=epoch, worker_id=worker_id, items=items)


def top_k(
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
