"""The larger requests, from records to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_store.client import wire
from kv_store.client.errors import InvalidStoreRequest, refusing_odd_fields
from kv_store.client.records import IndexParams, RowsWanted
from kv_store.v1 import kv_store_pb2 as pb


@dataclass(frozen=True, slots=True)
class Build:
    """What to train: tokens of one layer; `prefill_seconds` 0 when unknown."""

    sequence_id: str
    layer: int
    token_begin: int
    token_end: int
    params: IndexParams
    seed: int
    prefill_seconds: float


def build_index(epoch: int, worker_id: str, build: Build) -> pb.BuildIndexRequest:
    """Raises InvalidStoreRequest for a value that no message can carry."""
    with refusing_odd_fields():
        request = pb.BuildIndexRequest(
            epoch=epoch,
            worker_id=worker_id,
            sequence_id=build.sequence_id,
            layer=build.layer,
            token_begin=build.token_begin,
            token_end=build.token_end,
            seed=build.seed,
            prefill_seconds=build.prefill_seconds,
        )
    wire.set_params(request, build.params)
    return request


@dataclass(frozen=True, slots=True)
class Seal:
    """What of a sequence is to become visible, and how its slabs are called."""

    sequence_id: str
    num_tokens: int
    layer_begin: int
    layer_end: int
    prefix_hashes: Sequence[bytes]


def seal(epoch: int, worker_id: str, sealed: Seal) -> pb.SealRequest:
    with refusing_odd_fields():
        return pb.SealRequest(
            epoch=epoch,
            worker_id=worker_id,
            sequence_id=sealed.sequence_id,
            num_tokens=sealed.num_tokens,
            layer_begin=sealed.layer_begin,
            layer_end=sealed.layer_end,
            prefix_hashes=sealed.prefix_hashes,
        )


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
    epoch: int, worker_id: str, index_id: int, queries: npt.NDArray[np.float32], k: int
) -> pb.TopKRequest:
    """Queries float32 [num_kv_heads, group_size, head_dim]. Raises InvalidStoreRequest."""
    if queries.ndim != 3:
        raise InvalidStoreRequest(
            f"queries are {list(queries.shape)}, not [num_kv_heads, group_size, head_dim]"
        )
    with refusing_odd_fields():
        return pb.TopKRequest(
            epoch=epoch,
            worker_id=worker_id,
            index_id=index_id,
            queries=np.ascontiguousarray(queries, "<f4").tobytes(),
            group_size=queries.shape[1],
            k=k,
        )
