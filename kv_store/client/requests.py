"""The larger requests, from records to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_store.client import wire
from kv_store.client.errors import refusing_odd_fields
from kv_store.client.records import IndexParams, RowsWanted, TopKWanted
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
