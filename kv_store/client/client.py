"""The client that a worker uses: sequences, rows, indexes and sessions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

import grpc
import numpy as np
import numpy.typing as npt

from kv_store.client import wire
from kv_store.client.attachment import Attachment, attach
from kv_store.client.ends import SequenceEnd
from kv_store.client.errors import InvalidStoreRequest, NotInStore, StoreError, StoreSilent
from kv_store.client.indexes import IndexParams, IndexSegment, index_bytes
from kv_store.client.layout import Layout
from kv_store.client.proofs import Proofs
from kv_store.client.rpc import StoreRpc, TraceOf, no_trace
from kv_store.client.selection import top_k
from kv_store.client.slab_tables import Begun, RowsWanted, SlabTable, TopKWanted, count_rows
from kv_store.client.stats import SessionInfo, StoreStats
from kv_store.client.transports import transport_class
from kv_store.v1 import kv_store_pb2 as pb

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]


class StoreClient:
    """One worker's attachment. Thread-safe; gathers take turns, since their results share one segment.

    Every method raises StoreSilent when the store does not answer in time, and from then on at once until it does;
    StoreUnreachable when it is gone, and StaleEpoch when it was restarted or dropped this worker: `reattach` then
    starts over with no sequence. Made by `connect`.
    """

    def __init__(
        self,
        layout: Layout,
        worker_id: str,
        max_gather_rows: int,
        connect: Callable[[float], Attachment],
        timeout_seconds: float,
        call_seconds: float,
    ):
        self.layout = layout
        self._worker_id = worker_id
        self.max_gather_rows = max_gather_rows
        self._connect = connect
        # Of the sequences that are open.
        self._tables: dict[str, SlabTable] = {}
        self._gather_lock = threading.Lock()
        self._call_seconds = call_seconds
        self._proofs = Proofs()
        self._attached = connect(timeout_seconds)

    @classmethod
    def connect(
        cls,
        target: str,
        layout: Layout,
        *,
        worker_id: str,
        transport: str = "zero_copy",
        max_gather_rows: int = 65536,
        timeout_seconds: float = 10.0,
        call_seconds: float | None = None,
        token: str = "",
        interceptors: Sequence[grpc.UnaryUnaryClientInterceptor] = (),
        root: bytes = b"",
        trace_of: TraceOf = no_trace,
    ) -> Self:
        """Attach to the store at `target` ("unix:PATH" or "HOST:PORT"), waiting up to the timeout for it.

        call_seconds: what each call may take from then on, beside the time that rows take to move, and `reattach` too;
        None: as long. token: the store's, where it asks for one. interceptors: of its calls. root: see `open_channel`.
        trace_of: see `StoreRpc`. Raises InvalidStoreRequest when the store holds another layout, StoreFull,
        HandoffRefused, TokenRefused.
        """
        kind, call_seconds = transport_class(transport), call_seconds or timeout_seconds

        def connect(seconds: float) -> Attachment:
            rpc = StoreRpc(target, call_seconds, token, interceptors, root, trace_of)
            return attach(rpc, layout, worker_id, kind, max_gather_rows, seconds)

        return cls(layout, worker_id, max_gather_rows, connect, timeout_seconds, call_seconds)

    @property
    def epoch(self) -> int:
        """The store's start that this client is attached to."""
        return self._attached.epoch

    @property
    def tokens_per_slab(self) -> int:
        return self._attached.geometry.tokens_per_slab

    @property
    def slab_bytes(self) -> int:
        return self._attached.geometry.slab_bytes

    @property
    def transport(self) -> str:
        """Its name: "zero_copy", "shm" or "grpc"."""
        return self._attached.transport.name

    @property
    def selects_in_store(self) -> bool:
        """Return whether indexes stay in the store, which then selects tokens (`top_k`)."""
        return self._attached.transport.selects_in_store

    @property
    def arena(self) -> Bytes:
        """The mapped arena, uint8 [arena_bytes], for a GPU worker to register. Raises InvalidStoreRequest."""
        return self._attached.transport.mapping()

    def begin(
        self,
        sequence_id: str,
        num_tokens: int,
        prefix_hashes: Sequence[bytes] = (),
        takes_less: bool = False,
        owner: str = "",
    ) -> Begun:
        """Start a sequence, or leave nothing behind: it shares the sealed slabs of the longest known prefix, and has
        slabs for `num_tokens` tokens in all. After StoreSilent it may be asked again.

        takes_less: where room is missing it has the known prefix only; where none is known it is not started, and has
        no slabs. owner: whose what it holds is, what others find of it, and its session; where room is needed, who
        holds the most gives some up first. Raises StoreFull, which names the missing bytes, InvalidStoreRequest, and
        PrefixLoading: ask again soon.
        """
        attached = self._attached
        attached.ends.settle_for(sequence_id, prefix_hashes)
        try:
            reply = attached.ends.with_all_room(
                lambda: attached.ask(
                    "Begin",
                    sequence_id=sequence_id,
                    num_tokens=num_tokens,
                    prefix_hashes=prefix_hashes,
                    takes_less=takes_less,
                    owner=owner,
                )
            )
        except StoreSilent:
            # It may have begun there all the same.
            attached.ends.put(SequenceEnd(sequence_id))
            raise
        table = self._tables.setdefault(
            sequence_id, SlabTable(sequence_id, attached.geometry, reply.num_shared_tokens)
        )
        try:
            table.adopt(reply.slab_table, reply.slabs_per_layer, attached.num_slabs)
        except StoreError:
            self.end(sequence_id)
            raise
        if takes_less and num_tokens and not reply.slabs_per_layer:
            # Not begun, so nobody ends it.
            self._tables.pop(sequence_id, None)
        return Begun(reply.num_shared_tokens, table.table)

    def reserve(self, sequence_id: str, num_tokens: int) -> npt.NDArray[np.int32]:
        """Slabs of every layer for `num_tokens` tokens in all: int32 [num_layers, slabs_per_layer], read-only.

        All or nothing. Raises StoreFull, which names the missing bytes, NotInStore, InvalidStoreRequest.
        """
        attached = self._attached
        table = self._table(sequence_id)
        reply = attached.ends.with_all_room(
            lambda: attached.ask("Reserve", sequence_id=sequence_id, num_tokens=num_tokens)
        )
        table.adopt(reply.slab_table, reply.slabs_per_layer, attached.num_slabs)
        return table.table

    def _table(self, sequence_id: str) -> SlabTable:
        """Raises NotInStore."""
        if (table := self._tables.get(sequence_id)) is None:
            raise NotInStore(f"sequence {sequence_id!r} is not open in this client")
        return table

    def missing_alone(self, num_tokens: int, indexes: Sequence[tuple[IndexParams, int]] = ()) -> int:
        """Bytes that a sequence of so many tokens, with an index over so many of them for each given, would miss if
        nothing else lay in the arena; 0 where it fits. Makes no call."""
        attached, geometry = self._attached, self._attached.geometry
        wanted = self.layout.num_layers * geometry.slabs_for(num_tokens)
        for params, count in indexes:
            wanted += -(-index_bytes(params, self.layout, count) // geometry.slab_bytes)
        return max(0, wanted - (attached.num_slabs - attached.response_slabs)) * geometry.slab_bytes

    def put(self, sequence_id: str, layer: int, token_begin: int, rows: Bytes) -> None:
        """Write rows uint8 [num_kv_heads, num_tokens, row_bytes] (any strides); invisible until sealed.

        Raises InvalidStoreRequest for tokens that are not reserved or already immutable, NotInStore.
        """
        attached = self._attached
        attached.lease.check()
        table = self._table(sequence_id)
        table.check_rows(rows)
        table.check_writable(layer, token_begin, rows.shape[1])
        with attached.noting_loss():
            attached.transport.put(sequence_id, layer, table.table[layer], token_begin, rows)

    def seal(
        self,
        sequence_id: str,
        num_tokens: int,
        layer_begin: int = 0,
        layer_end: int | None = None,
        prefix_hashes: Sequence[bytes] = (),
        session_id: str = "",
        session_label: str = "",
    ) -> None:
        """Make tokens below `num_tokens` visible in layers [layer_begin, layer_end); full slabs become immutable.

        `prefix_hashes`: a chain of 32-byte hashes, one for each full slab; those slabs stay for reuse after the end.
        `session_id`: a name under which they are kept longest; `list_sessions` finds it by the sequence's owner. Raises
        InvalidStoreRequest, NotInStore.
        """
        table = self._table(sequence_id)
        end = self.layout.num_layers if layer_end is None else layer_end
        self._attached.ask(
            "Seal",
            sequence_id=sequence_id,
            num_tokens=num_tokens,
            layer_begin=layer_begin,
            layer_end=end,
            prefix_hashes=prefix_hashes,
            session_id=session_id,
            session_label=session_label,
        )
        sealed = table.sealed[layer_begin:end]
        np.maximum(sealed, num_tokens, out=sealed)

    def build_index(
        self,
        sequence_id: str,
        layer: int,
        token_begin: int,
        token_end: int,
        params: IndexParams,
        seed: int = 0,
        prefill_seconds: float = 0.0,
    ) -> Future[IndexSegment]:
        """Train an index over sealed tokens of one layer in the background, once more where its checksum is wrong.

        `prefill_seconds` is the layer's measured prefill time, for the adaptive bound; 0 when unknown. The future
        raises StoreFull, InvalidStoreRequest, CorruptRows, NotInStore when the sequence was released meanwhile.
        """
        attached = self._attached
        request = wire.build_index(
            params,
            epoch=attached.epoch,
            worker_id=self._worker_id,
            sequence_id=sequence_id,
            layer=layer,
            token_begin=token_begin,
            token_end=token_end,
            seed=seed,
            prefill_seconds=prefill_seconds,
        )
        return self._proofs.build(attached, request)

    def verify(self, sequence_id: str) -> Future[int]:
        """Have the store's idle cores compare what a sequence shares since its begin with its checksums, in the
        background: how many slabs are corrupt. Nobody finds those any more; end the sequence. Raises NotInStore; the
        future raises StoreError."""
        num_tokens = self._table(sequence_id).num_prefix_tokens
        return self._proofs.verify(self._attached, sequence_id, num_tokens)

    @property
    def num_corrupt(self) -> int:
        """Slabs and indexes whose checksum was wrong, since the start."""
        return self._proofs.num_corrupt

    def gather(self, layer: int, wanted: Sequence[RowsWanted]) -> Bytes:
        """Sealed rows of one layer, in the order asked for: uint8 [num_rows, row_bytes].

        Read-only and valid until the next gather. Raises InvalidStoreRequest for a position that is not sealed or
        more than `max_gather_rows` rows, NotInStore.
        """
        attached = self._attached
        if (num_rows := count_rows(wanted)) > self.max_gather_rows:
            raise InvalidStoreRequest(f"{num_rows} rows asked for, max_gather_rows is {self.max_gather_rows}")
        slabs = [
            self._table(item.sequence_id).readable(layer, item.kv_head, item.positions) for item in wanted
        ]
        with self._gather_lock, attached.noting_loss():
            rows = attached.transport.gather(layer, wanted, slabs)
            # Without a lease the slabs may have become another's while they were read.
            attached.lease.check()
            return rows

    def top_k(self, layer: int, wanted: Sequence[TopKWanted], scale: float) -> tuple[list[Positions], Bytes]:
        """The best candidates by the store's own indexes: positions int64 [num_kv_heads, min(k, candidates)] of each
        item, ascending, and the rows asked for, uint8 [num_rows, row_bytes], ordered by item, head and position.

        scale: of the model's attention. Raises InvalidStoreRequest for tokens that are not sealed or in no index,
        NotInStore.
        """
        return top_k(self._attached, layer, wanted, scale)

    def end(
        self,
        sequence_id: str,
        num_tokens: int = 0,
        prefix_hashes: Sequence[bytes] = (),
        session_id: str = "",
        session_label: str = "",
    ) -> None:
        """End a sequence, whose slabs and indexes are free soon; unknown ids are harmless. Returns at once and raises
        nothing: the store is told beside the caller, again if it does not answer.

        num_tokens: that are sealed before in all layers, as `seal` does; 0: none.
        """
        self._tables.pop(sequence_id, None)
        hashes = tuple(prefix_hashes)
        self._attached.ends.put(SequenceEnd(sequence_id, num_tokens, hashes, session_id, session_label))

    def cut_to_prefix(self, sequence_id: str) -> None:
        """Give up the slabs that a sequence does not share; it goes on reading what `begin` let it share. Raises
        NotInStore, InvalidStoreRequest where it has indexes."""
        attached = self._attached
        self._table(sequence_id).cut_to_prefix()
        attached.tell_ended([SequenceEnd(sequence_id, keeps_prefix=True)])

    def list_sessions(self, owner: str) -> tuple[SessionInfo, ...]:
        """An owner's sessions, the one that was used longest ago first. As before a change of one, what has ended is
        told before."""
        reply = self._ask_settled("ListSessions", owner=owner)
        return tuple(wire.record_of(SessionInfo, session) for session in reply.sessions)

    def pin_session(self, session_id: str, is_pinned: bool, seconds: float = 0.0) -> None:
        """Let a session be evicted after all that are not pinned, for so long, 0: until it is unpinned; or no longer.
        Raises NotInStore, StoreFull beyond its owner's limit."""
        self._ask_settled("PinSession", session_id=session_id, is_pinned=is_pinned, seconds=seconds)

    def drop_session(self, session_id: str) -> None:
        """Forget a session and free what it held, but for what is in another one or in use. Raises NotInStore."""
        self._ask_settled("DropSession", session_id=session_id)

    def _ask_settled(self, method: str, **fields: Any) -> Any:
        attached = self._attached
        attached.ends.settle()
        return attached.ask(method, **fields)

    def stats(self) -> StoreStats:
        """The whole store's figures, every worker's sequences included; needs no valid lease. What has ended is told
        before."""
        with contextlib.suppress(StoreError):
            self._attached.ends.settle()
        rpc = self._attached.rpc
        return wire.record_of(StoreStats, rpc.call(rpc.stub.Stats, pb.StatsRequest()))

    @property
    def is_answering(self) -> bool:
        """Return whether a store answered the last call or heartbeat. It may have been restarted since."""
        return self._attached.lease.is_answered

    @property
    def silent_seconds(self) -> float:
        """How long the store has not answered, although its connection is there; 0 while it answers, or is gone."""
        return self._attached.rpc.silent_seconds

    def check(self) -> None:
        """Raises StaleEpoch or StoreUnreachable when what this client holds is known to be lost."""
        self._attached.lease.check()

    def reattach(self) -> None:
        """Start over: new epoch, no sequence, no index; unregister the old mapping first.

        Raises as `connect` does; the client may then try again, and its heartbeat goes on.
        """
        self._tables.clear()
        attached = self._connect(self._call_seconds)
        self._attached.close()
        self._attached = attached

    def unmap(self) -> None:
        """Let go of the arena, to which `reattach` leads again: a store that starts next may need the memory."""
        self._attached.transport.close()

    def close(self) -> None:
        """End the heartbeat and the connection, once the store knows what has ended or does not answer; it drops what
        is left when the lease runs out."""
        self._proofs.close()
        self._tables.clear()
        self._attached.close(is_drained=True)
