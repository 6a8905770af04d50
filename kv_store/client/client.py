"""What a worker uses of the store: sequences, rows, indexes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from kv_store.client import wire
from kv_store.client.errors import InvalidStoreRequest, NotInStore, StaleEpoch
from kv_store.client.layout import Layout, SlabGeometry
from kv_store.client.lease import Lease
from kv_store.client.records import IndexParams, IndexSegment, PrefixMatch, RowsWanted, StoreStats
from kv_store.client.rpc import StoreRpc
from kv_store.client.transports import Transport, transport_class
from kv_store.v1 import kv_store_pb2 as pb

_BUILD_THREADS = 16
_BUILD_TIMEOUT_SECONDS = 600.0
Bytes = npt.NDArray[np.uint8]
Result = TypeVar("Result")


@dataclass(slots=True)
class _Sequence:
    """What this client knows of a sequence; `sealed` are tokens per layer."""

    table: npt.NDArray[np.int32]
    sealed: list[int]
    capacity: int = 0


@dataclass(frozen=True, slots=True)
class _Attachment:
    """Everything that ends with an epoch."""

    epoch: int
    geometry: SlabGeometry
    rpc: StoreRpc
    transport: Transport
    lease: Lease


class StoreClient:
    """One worker's attachment. Thread-safe; gathers take turns, since their results share one segment.

    Every method raises StoreUnreachable when the store does not answer in time and StaleEpoch when it was
    restarted or dropped this worker: `reattach` then starts anew with no sequence.
    """

    def __init__(
        self,
        target: str,
        layout: Layout,
        *,
        worker_id: str,
        transport: str = "shm",
        max_gather_rows: int = 65536,
        timeout_seconds: float = 10.0,
    ) -> None:
        self._target = target
        self._layout = layout
        self._worker_id = worker_id
        self._transport_class = transport_class(transport)
        self._max_gather_rows = max_gather_rows
        self._timeout_seconds = timeout_seconds
        self._sequences: dict[str, _Sequence] = {}
        self._gather_lock = threading.Lock()
        self._builds = ThreadPoolExecutor(_BUILD_THREADS, thread_name_prefix="index-build")
        self._attached = self._attach()

    @classmethod
    def connect(
        cls,
        target: str,
        layout: Layout,
        *,
        worker_id: str,
        transport: str = "shm",
        max_gather_rows: int = 65536,
        timeout_seconds: float = 10.0,
    ) -> StoreClient:
        """Attach to the store at `target` ("unix:PATH" or "HOST:PORT"), waiting up to the timeout for it.

        Raises InvalidStoreRequest when the store holds another layout, StoreFull, HandoffRefused.
        """
        return cls(
            target,
            layout,
            worker_id=worker_id,
            transport=transport,
            max_gather_rows=max_gather_rows,
            timeout_seconds=timeout_seconds,
        )

    @property
    def epoch(self) -> int:
        return self._attached.epoch

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def tokens_per_slab(self) -> int:
        return self._attached.geometry.tokens_per_slab

    @property
    def slab_bytes(self) -> int:
        return self._attached.geometry.slab_bytes

    @property
    def transport(self) -> str:
        return self._transport_class.name

    @property
    def max_gather_rows(self) -> int:
        return self._max_gather_rows

    @property
    def arena(self) -> Bytes:
        """The mapped arena, uint8 [arena_bytes], for a GPU worker to register. Raises InvalidStoreRequest."""
        return self._attached.transport.mapping()

    def open_sequence(self, sequence_id: str) -> None:
        """Start an empty sequence; nothing changes when this worker has it open."""
        attached = self._attached
        self._simple(attached.rpc.stub.OpenSequence, pb.OpenSequenceRequest, sequence_id)
        empty = np.empty((self._layout.num_layers, 0), np.int32)
        self._sequences.setdefault(sequence_id, _Sequence(empty, [0] * self._layout.num_layers))

    def reserve(self, sequence_id: str, num_tokens: int) -> npt.NDArray[np.int32]:
        """Slabs of every layer for `num_tokens` tokens in all: int32 [num_layers, slabs_per_layer], read-only.

        All or nothing. Raises StoreFull, which names the missing bytes, NotInStore, InvalidStoreRequest.
        """
        attached = self._attached
        sequence = self._known(sequence_id)
        with _refusing_odd_fields():
            request = pb.ReserveRequest(
                epoch=attached.epoch,
                worker_id=self._worker_id,
                sequence_id=sequence_id,
                num_tokens=num_tokens,
            )
        reply = self._call(attached, attached.rpc.stub.Reserve, request)
        self._adopt_table(sequence, reply.slab_table, reply.slabs_per_layer)
        return sequence.table

    def put(self, sequence_id: str, layer: int, token_begin: int, rows: Bytes) -> None:
        """Write rows uint8 [num_kv_heads, num_tokens, row_bytes] (any strides); invisible until sealed.

        Raises InvalidStoreRequest for tokens that are not reserved or already immutable, NotInStore.
        """
        attached = self._attached
        attached.lease.check()
        sequence = self._known(sequence_id)
        layout = self._layout
        shape = rows.shape
        if (
            rows.dtype != np.uint8
            or len(shape) != 3
            or shape[0] != layout.num_kv_heads
            or shape[2] != layout.row_bytes
        ):
            raise InvalidStoreRequest(
                f"rows are {rows.dtype} {list(shape)}, they must be "
                f"uint8 [{layout.num_kv_heads}, num_tokens, {layout.row_bytes}]"
            )
        if not 0 <= layer < layout.num_layers:
            raise InvalidStoreRequest(f"layer {layer} is not from 0 to {layout.num_layers - 1}")
        immutable = sequence.sealed[layer] & ~attached.geometry.token_mask
        if not (shape[1] >= 1 and immutable <= token_begin <= sequence.capacity - shape[1]):
            raise InvalidStoreRequest(
                f"{shape[1]} tokens from {token_begin} in layer {layer}: tokens below {immutable} are immutable, "
                f"tokens from {sequence.capacity} on are not reserved"
            )
        with _noting_loss(attached.lease):
            attached.transport.put(sequence_id, layer, sequence.table[layer], token_begin, rows)

    def seal(
        self,
        sequence_id: str,
        num_tokens: int,
        layer_begin: int = 0,
        layer_end: int | None = None,
        prefix_hashes: Sequence[bytes] = (),
    ) -> None:
        """Make tokens below `num_tokens` visible in layers [layer_begin, layer_end); full slabs become immutable.

        `prefix_hashes`: a chain of 32-byte hashes, one for each full slab; those slabs stay for reuse after
        `release`. Raises InvalidStoreRequest, NotInStore.
        """
        attached = self._attached
        sequence = self._known(sequence_id)
        end = self._layout.num_layers if layer_end is None else layer_end
        with _refusing_odd_fields():
            request = pb.SealRequest(
                epoch=attached.epoch,
                worker_id=self._worker_id,
                sequence_id=sequence_id,
                num_tokens=num_tokens,
                layer_begin=layer_begin,
                layer_end=end,
                prefix_hashes=prefix_hashes,
            )
        self._call(attached, attached.rpc.stub.Seal, request)
        for layer in range(layer_begin, end):
            sequence.sealed[layer] = max(sequence.sealed[layer], num_tokens)

    def lookup_prefix(self, sequence_id: str, prefix_hashes: Sequence[bytes]) -> PrefixMatch:
        """Let an open, empty sequence share the sealed slabs of the longest known prefix.

        Raises InvalidStoreRequest when the sequence has slabs of its own, NotInStore.
        """
        attached = self._attached
        sequence = self._known(sequence_id)
        with _refusing_odd_fields():
            request = pb.LookupPrefixRequest(
                epoch=attached.epoch,
                worker_id=self._worker_id,
                sequence_id=sequence_id,
                prefix_hashes=prefix_hashes,
            )
        reply = self._call(attached, attached.rpc.stub.LookupPrefix, request)
        if reply.num_tokens and not sequence.capacity:
            self._adopt_table(sequence, reply.slab_table, reply.slabs_per_layer)
            sequence.sealed = [reply.num_tokens] * self._layout.num_layers
        table = np.array(reply.slab_table, np.int32).reshape(self._layout.num_layers, reply.slabs_per_layer)
        return PrefixMatch(reply.num_tokens, table)

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
        """Train an index over sealed tokens of one layer in the background.

        `prefill_seconds` is the layer's measured prefill time, for the adaptive bound; 0 when unknown. The future
        raises StoreFull, InvalidStoreRequest, NotInStore when the sequence was released meanwhile.
        """
        attached = self._attached
        with _refusing_odd_fields():
            request = pb.BuildIndexRequest(
                epoch=attached.epoch,
                worker_id=self._worker_id,
                sequence_id=sequence_id,
                layer=layer,
                token_begin=token_begin,
                token_end=token_end,
                seed=seed,
                prefill_seconds=prefill_seconds,
            )
        wire.set_params(request, params)
        return self._builds.submit(self._build, attached, request)

    def gather(self, layer: int, wanted: Sequence[RowsWanted]) -> Bytes:
        """Sealed rows of one layer, in the order asked for: uint8 [num_rows, row_bytes].

        Read-only and valid until the next gather. Raises InvalidStoreRequest for a position that is not sealed or
        more than `max_gather_rows` rows, NotInStore.
        """
        attached = self._attached
        num_rows = sum(item.positions.size for item in wanted)
        if num_rows > self._max_gather_rows:
            raise InvalidStoreRequest(
                f"{num_rows} rows asked for, max_gather_rows is {self._max_gather_rows}"
            )
        with _refusing_odd_fields():
            request = pb.GatherRequest(
                epoch=attached.epoch,
                worker_id=self._worker_id,
                items=[
                    pb.GatherItem(
                        sequence_id=item.sequence_id,
                        layer=layer,
                        kv_head=item.kv_head,
                        positions=item.positions.tolist(),
                    )
                    for item in wanted
                ],
            )
        with self._gather_lock, _noting_loss(attached.lease):
            return attached.transport.gather(request, num_rows)

    def top_k(self, index_id: int, queries: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
        """Positions int64 [num_kv_heads, k] for queries float32 [num_kv_heads, group_size, head_dim].

        Ascending; -1 follows the last of a head with fewer candidates. Raises InvalidStoreRequest, NotInStore.
        """
        attached = self._attached
        if queries.ndim != 3:
            raise InvalidStoreRequest(
                f"queries are {list(queries.shape)}, not [num_kv_heads, group_size, head_dim]"
            )
        with _refusing_odd_fields():
            request = pb.TopKRequest(
                epoch=attached.epoch,
                worker_id=self._worker_id,
                index_id=index_id,
                queries=np.ascontiguousarray(queries, "<f4").tobytes(),
                group_size=queries.shape[1],
                k=k,
            )
        reply = self._call(attached, attached.rpc.stub.TopK, request)
        return np.array(reply.positions, np.int64).reshape(self._layout.num_kv_heads, k)

    def release(self, sequence_id: str) -> None:
        """End a sequence; its private slabs and indexes are free at once. Unknown ids are harmless."""
        attached = self._attached
        self._sequences.pop(sequence_id, None)
        self._simple(attached.rpc.stub.Release, pb.ReleaseRequest, sequence_id)

    def pin_session(self, sequence_id: str, session_id: str) -> None:
        """Keep the sequence's full slabs that were sealed with hashes; call it before `release`."""
        attached = self._attached
        with _refusing_odd_fields():
            request = pb.PinSessionRequest(
                epoch=attached.epoch,
                worker_id=self._worker_id,
                sequence_id=sequence_id,
                session_id=session_id,
            )
        self._call(attached, attached.rpc.stub.PinSession, request)

    def drop_session(self, session_id: str) -> None:
        """Let the session's slabs be evicted. Raises NotInStore."""
        attached = self._attached
        request = pb.DropSessionRequest(epoch=attached.epoch, session_id=session_id)
        self._call(attached, attached.rpc.stub.DropSession, request)

    def stats(self) -> StoreStats:
        """The whole store's figures, every worker's sequences included; needs no valid lease."""
        rpc = self._attached.rpc
        return wire.stats_from_message(rpc.call(rpc.stub.Stats, pb.StatsRequest()))

    def check(self) -> None:
        """Raises StaleEpoch or StoreUnreachable when what this client holds is known to be lost."""
        self._attached.lease.check()

    def reattach(self) -> None:
        """Start anew: new epoch, no sequence, no index; unregister the old mapping first.

        Raises as `connect` does; the client may then try again.
        """
        self._detach()
        self._attached = self._attach()

    def close(self) -> None:
        """End the heartbeat and the connection; the store drops what is left when the lease runs out."""
        self._builds.shutdown(wait=False, cancel_futures=True)
        self._detach()

    def _attach(self) -> _Attachment:
        rpc = StoreRpc(self._target, self._timeout_seconds)
        try:
            with _refusing_odd_fields():
                request = pb.AttachRequest(
                    worker_id=self._worker_id,
                    layout=wire.layout_to_message(self._layout),
                    max_gather_rows=self._transport_class.response_rows(self._max_gather_rows),
                )
            reply = rpc.attach(request)
            geometry = SlabGeometry(self._layout, reply.slab_bytes)
            if geometry.tokens_per_slab != reply.tokens_per_slab:
                raise InvalidStoreRequest(
                    f"the store cuts slabs into {reply.tokens_per_slab} tokens, this client into "
                    f"{geometry.tokens_per_slab}: run the same version on both sides"
                )
            transport = self._transport_class(rpc, self._layout, self._worker_id, reply)
        except BaseException:
            rpc.close()
            raise
        beat = pb.HeartbeatRequest(epoch=reply.epoch, worker_id=self._worker_id)
        lease = Lease(reply.lease_seconds, lambda: rpc.call(rpc.stub.Heartbeat, beat))
        return _Attachment(reply.epoch, geometry, rpc, transport, lease)

    def _detach(self) -> None:
        attached = self._attached
        self._sequences.clear()
        attached.rpc.close()
        attached.lease.close()
        attached.transport.close()

    def _known(self, sequence_id: str) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise NotInStore(f"sequence {sequence_id!r} is not open in this client")
        return sequence

    def _adopt_table(self, sequence: _Sequence, flat: Sequence[int], slabs_per_layer: int) -> None:
        table = np.array(flat, np.int32).reshape(self._layout.num_layers, slabs_per_layer)
        table.flags.writeable = False
        sequence.table = table
        sequence.capacity = slabs_per_layer * self.tokens_per_slab

    def _simple(self, method: Callable[..., object], kind: type, sequence_id: str) -> None:
        attached = self._attached
        with _refusing_odd_fields():
            request = kind(epoch=attached.epoch, worker_id=self._worker_id, sequence_id=sequence_id)
        self._call(attached, method, request)

    def _call(self, attached: _Attachment, method: Callable[..., Result], request: Message) -> Result:
        with _noting_loss(attached.lease):
            return attached.rpc.call(method, request)

    def _build(self, attached: _Attachment, request: pb.BuildIndexRequest) -> IndexSegment:
        with _noting_loss(attached.lease):
            reply = attached.rpc.call(attached.rpc.stub.BuildIndex, request, _BUILD_TIMEOUT_SECONDS)
            refs = tuple(wire.array_from_message(ref) for ref in reply.arrays)
            arrays = attached.transport.arrays(reply.index_id, refs)
        return IndexSegment(
            reply.index_id,
            wire.kind_from_message(reply.kind),
            arrays,
            reply.training_seconds,
            reply.iterations,
        )


@contextlib.contextmanager
def _refusing_odd_fields() -> Iterator[None]:
    """A field that no message can carry (negative, too large, not a string) is the caller's fault."""
    try:
        yield
    except (ValueError, TypeError) as exc:
        raise InvalidStoreRequest(f"a field that cannot be sent: {exc}") from exc


@contextlib.contextmanager
def _noting_loss(lease: Lease) -> Iterator[None]:
    """Once the store disowns this attachment, writing must stop too."""
    try:
        yield
    except StaleEpoch as exc:
        lease.lose(exc)
        raise
