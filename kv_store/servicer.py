"""gRPC in, plain calls out: messages are translated here, nothing else."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from carrel.process.tracing import Tracer
from carrel.process.version import Edition
from kv_store.calls import WatchedServicer, streaming, unary
from kv_store.client import wire
from kv_store.client.ends import SequenceEnd
from kv_store.client.errors import InvalidStoreRequest, StoreFull, VersionMismatch
from kv_store.client.wire import own_edition
from kv_store.config import StoreConfig
from kv_store.indexes import BuildRequest, IndexBuilder
from kv_store.rows import GatherItem, PutTarget, RowReader, RowWriter
from kv_store.selection import Selector, TopKItem
from kv_store.state import StoreState
from kv_store.store import Store
from kv_store.v1 import kv_store_pb2 as pb


class KVStoreServicer(WatchedServicer):
    """`carrel.kv_store.v1.KVStore` over the store's parts."""

    def __init__(
        self, config: StoreConfig, state: StoreState, store: Store, builder: IndexBuilder, tracer: Tracer
    ) -> None:
        super().__init__(state.calls, tracer)
        self._config = config
        self._handle = state.arena.handle
        self._edition = own_edition()
        self._store = store
        self._reader = RowReader(state)
        self._writer = RowWriter(state)
        self._builder = builder
        self._selector = Selector(state, self._reader)
        # A build keeps its thread until it is trained: builds must leave threads for everything else.
        self._build_permits = threading.BoundedSemaphore(config.max_pending_builds)

    @unary
    def Hello(self, request: pb.HelloRequest) -> pb.HelloResponse:
        self._check(request.edition)
        return pb.HelloResponse(edition=wire.edition_to_message(self._edition))

    @unary
    def Attach(self, request: pb.AttachRequest) -> pb.AttachResponse:
        self._check(request.edition)
        layout = wire.layout_from_message(request.layout)
        attachment = self._store.attach(request.worker_id, layout, request.max_gather_rows)
        socket = self._config.arena_socket
        return pb.AttachResponse(
            region_id=self._handle.region_id,
            epoch=self._handle.epoch,
            arena_bytes=self._handle.num_bytes,
            slab_bytes=self._config.slab_bytes,
            tokens_per_slab=attachment.tokens_per_slab,
            arena_socket=os.path.abspath(socket) if socket else "",
            response_offset=attachment.response_offset,
            response_bytes=attachment.response_bytes,
            lease_seconds=self._config.lease_seconds,
            edition=wire.edition_to_message(self._edition),
        )

    @unary
    def Begin(self, request: pb.BeginRequest) -> pb.BeginResponse:
        num_shared, table = self._store.begin(
            request.epoch,
            request.worker_id,
            request.sequence_id,
            request.num_tokens,
            tuple(request.prefix_hashes),
            request.takes_less,
            request.owner,
        )
        return pb.BeginResponse(
            num_shared_tokens=num_shared, slab_table=table.ravel().tolist(), slabs_per_layer=table.shape[1]
        )

    @unary
    def Reserve(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        table = self._store.reserve(request.epoch, request.worker_id, request.sequence_id, request.num_tokens)
        return pb.ReserveResponse(slab_table=table.ravel().tolist(), slabs_per_layer=table.shape[1])

    @unary
    def Seal(self, request: pb.SealRequest) -> pb.SealResponse:
        self._store.seal(
            request.epoch,
            request.worker_id,
            request.sequence_id,
            request.num_tokens,
            request.layer_begin,
            request.layer_end,
            tuple(request.prefix_hashes),
            request.session_id,
            request.session_label,
        )
        return pb.SealResponse()

    @unary
    def Verify(self, request: pb.VerifyRequest) -> pb.VerifyResponse:
        num_corrupt = self._store.verify(request.epoch, request.worker_id, request.sequence_id)
        return pb.VerifyResponse(num_corrupt=num_corrupt)

    @unary
    def BuildIndex(self, request: pb.BuildIndexRequest) -> pb.BuildIndexResponse:
        build = BuildRequest(
            request.sequence_id,
            request.layer,
            request.token_begin,
            request.token_end,
            wire.params_from_message(request),
            request.seed,
            request.prefill_seconds,
        )
        if not self._build_permits.acquire(blocking=False):
            raise StoreFull(f"{self._config.max_pending_builds} index builds are pending: try again later")
        try:
            built = self._builder.build(request.epoch, request.worker_id, build)
        finally:
            self._build_permits.release()
        return pb.BuildIndexResponse(
            kind=wire.KINDS[built.kind],
            arrays=[pb.ArrayRef(**asdict(ref)) for ref in built.arrays],
            training_seconds=built.training_seconds,
            iterations=built.iterations,
        )

    @streaming
    def TopK(self, request: pb.TopKRequest) -> Iterator[bytes]:
        items = [
            TopKItem(
                item.sequence_id,
                item.token_begin,
                item.token_end,
                item.k,
                item.queries,
                item.resident if item.HasField("resident") else None,
            )
            for item in request.items
        ]
        return self._selector.chunks(request.epoch, request.worker_id, request.layer, request.scale, items)

    @unary
    def Gather(self, request: pb.GatherRequest) -> pb.GatherResponse:
        offset, num_rows = self._reader.gather(request.epoch, request.worker_id, _items(request))
        return pb.GatherResponse(offset=offset, num_rows=num_rows)

    @streaming
    def GatherRows(self, request: pb.GatherRequest) -> Iterator[bytes]:
        return self._reader.chunks(request.epoch, request.worker_id, _items(request))

    @unary
    def PutRows(self, request_iterator: Iterator[pb.PutRowsRequest]) -> pb.PutRowsResponse:
        first = next(request_iterator, None)
        if first is None:
            raise InvalidStoreRequest("PutRows sent no message")
        target = PutTarget(first.sequence_id, first.layer, first.token_begin, first.num_tokens)
        pieces = (message.data for message in itertools.chain((first,), request_iterator))
        self._writer.put(first.epoch, first.worker_id, target, pieces)
        return pb.PutRowsResponse()

    @unary
    def End(self, request: pb.EndRequest) -> pb.EndResponse:
        ends = [wire.record_of(SequenceEnd, each) for each in request.ends]
        self._store.end(request.epoch, request.worker_id, ends)
        return pb.EndResponse()

    @unary
    def ListSessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        sessions = self._store.sessions.list(request.epoch, request.worker_id, request.owner)
        return pb.ListSessionsResponse(sessions=[pb.Session(**asdict(session)) for session in sessions])

    @unary
    def PinSession(self, request: pb.PinSessionRequest) -> pb.PinSessionResponse:
        self._store.sessions.pin(
            request.epoch, request.worker_id, request.session_id, request.is_pinned, request.seconds
        )
        return pb.PinSessionResponse()

    @unary
    def DropSession(self, request: pb.DropSessionRequest) -> pb.DropSessionResponse:
        self._store.sessions.drop(request.epoch, request.worker_id, request.session_id)
        return pb.DropSessionResponse()

    @unary
    def Heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        self._store.heartbeat(request.epoch, request.worker_id)
        return pb.HeartbeatResponse()

    def _check(self, caller: pb.Edition) -> None:
        edition = wire.record_of(Edition, caller)
        if reason := self._edition.refusal("this store", "the caller", edition):
            raise VersionMismatch(reason)

    @unary
    def Stats(self, request: pb.StatsRequest) -> pb.StatsResponse:
        return pb.StatsResponse(**asdict(self._store.stats()))


def _items(request: pb.GatherRequest) -> list[GatherItem]:
    return [
        GatherItem(
            item.sequence_id,
            item.layer,
            item.kv_head,
            np.fromiter(item.positions, np.uint64, len(item.positions)),
        )
        for item in request.items
    ]
