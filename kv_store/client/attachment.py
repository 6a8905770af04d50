"""Everything a client knows that ends with an epoch: connection, mapping, lease."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from carrel.process.noted_errors import NotedErrors
from kv_store.client import wire
from kv_store.client.ends import Ends, SequenceEnd, start_thread
from kv_store.client.errors import (
    CorruptRows,
    InvalidStoreRequest,
    StaleEpoch,
    StoreError,
    StoreUnreachable,
    refusing_odd_fields,
)
from kv_store.client.indexes import ArrayRef, IndexSegment
from kv_store.client.layout import Layout, SlabGeometry
from kv_store.client.rpc import StoreRpc
from kv_store.client.transports import Transport
from kv_store.v1 import kv_store_pb2 as pb

_BEATS_PER_LEASE = 3
_BEAT_SECONDS = 0.5

logger = logging.getLogger(__name__)


class Lease:
    """Calls `beat` every `beat_seconds`, and three times a lease at least, until `close`.

    is_answered: whether a store was there when last asked, be it another start that does not know this worker.
    A store may hand this worker's slabs to others once the lease has run out, so writing needs `check`.
    """

    def __init__(
        self, lease_seconds: float, beat: Callable[[], object], beat_seconds: float = _BEAT_SECONDS
    ) -> None:
        self._seconds = lease_seconds
        self._beat_seconds = min(beat_seconds, lease_seconds / _BEATS_PER_LEASE)
        self._beat = beat
        self._valid_until = time.monotonic() + lease_seconds
        self._lost: StaleEpoch | None = None
        self.is_answered = True
        self._closing = threading.Event()
        self._errors = NotedErrors(logger, "the heartbeat to the KV store")
        self._thread = start_thread(self._run, "store-heartbeat")

    def check(self) -> None:
        """Raises StaleEpoch when the store has said so, StoreUnreachable when it was silent for a lease."""
        if self._lost is not None:
            raise StaleEpoch(str(self._lost))
        if time.monotonic() > self._valid_until:
            raise StoreUnreachable(
                f"the KV store did not answer for {self._seconds:g} s: the lease has run out"
            )

    def lose(self, error: StaleEpoch) -> None:
        """Note that the store no longer knows this attachment."""
        self._lost = error

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=self._seconds)

    def _run(self) -> None:
        while not self._closing.wait(self._beat_seconds):
            started = time.monotonic()
            try:
                self._beat()
            except StaleEpoch as exc:
                # Beats go on: whether there is a store to attach to is known by them.
                self.lose(exc)
                self.is_answered = True
            except StoreError:
                # The next beat tries again; `check` refuses once the lease has run out.
                self.is_answered = False
            except Exception as exc:
                self._errors.note(exc)
                self.is_answered = False
            else:
                self.is_answered = True
                self._valid_until = started + self._seconds


_BUILD_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """One attachment of one worker; `close` ends it, arrays handed out keep their bytes mapped.

    num_slabs: of the arena. response_slabs: those of them that answers lie in."""

    epoch: int
    worker_id: str
    geometry: SlabGeometry
    num_slabs: int
    response_slabs: int
    rpc: StoreRpc
    transport: Transport
    lease: Lease
    ends: Ends

    def ask(self, method: str, **fields: Any) -> Any:
        """The reply to a method of this name, asked with these fields by this worker. Raises StoreError; a StaleEpoch
        ends the lease too."""
        with refusing_odd_fields():
            request = getattr(pb, f"{method}Request")(epoch=self.epoch, worker_id=self.worker_id, **fields)
        with self.noting_loss():
            return self.rpc.call(getattr(self.rpc.stub, method), request)

    @contextlib.contextmanager
    def noting_loss(self) -> Iterator[None]:
        """Once the store disowns this attachment, writing into the arena must stop too; silence ends with a beat."""
        try:
            yield
        except StoreUnreachable:
            self.lease.is_answered = False
            raise
        except StaleEpoch as exc:
            self.lease.lose(exc)
            raise

    def tell_ended(self, ends: Sequence[SequenceEnd]) -> None:
        """Raises StoreError."""
        self.ask("End", ends=[pb.SequenceEnd(**asdict(each)) for each in ends])

    def close(self, is_drained: bool = False) -> None:
        """is_drained: the store hears of what has ended first."""
        self.ends.close(is_drained)
        self.rpc.close()
        self.lease.close()
        self.transport.close()


def attach(
    rpc: StoreRpc,
    layout: Layout,
    worker_id: str,
    transport: type[Transport],
    max_gather_rows: int,
    timeout_seconds: float,
) -> Attachment:
    """Attach, map and start the heartbeat within the timeout. Raises StoreError; nothing is left open then."""
    with contextlib.ExitStack() as stack:
        stack.callback(rpc.close)
        with refusing_odd_fields():
            request = pb.AttachRequest(
                worker_id=worker_id,
                layout=wire.layout_to_message(layout),
                max_gather_rows=max_gather_rows if transport.has_response else 0,
                edition=wire.edition_to_message(wire.own_edition()),
            )
        reply = rpc.attach(request, timeout_seconds)
        geometry = SlabGeometry(layout, reply.slab_bytes)
        if geometry.tokens_per_slab != reply.tokens_per_slab:
            raise InvalidStoreRequest(
                f"the store cuts slabs into {reply.tokens_per_slab} tokens, this client into "
                f"{geometry.tokens_per_slab}: run the same version on both sides"
            )
        mapped = transport(rpc, geometry, worker_id, reply, timeout_seconds)
        stack.callback(mapped.close)
        beat = pb.HeartbeatRequest(epoch=reply.epoch, worker_id=worker_id)
        lease = Lease(reply.lease_seconds, lambda: rpc.beat(beat))
        stack.callback(lease.close)
        ends = Ends(lambda batch: attached.tell_ended(batch), rpc.timeout_seconds)
        stack.pop_all()
    num_slabs, response_slabs = (
        reply.arena_bytes // reply.slab_bytes,
        -(-reply.response_bytes // reply.slab_bytes),
    )
    attached = Attachment(
        reply.epoch, worker_id, geometry, num_slabs, response_slabs, rpc, mapped, lease, ends
    )
    return attached


def build_and_fetch(attached: Attachment, request: pb.BuildIndexRequest) -> IndexSegment:
    """Wait for the trainers, then get at the arrays, and compare their checksums. Raises CorruptRows, StoreError."""
    rpc = attached.rpc
    with attached.noting_loss():
        reply = attached.ends.with_all_room(
            lambda: rpc.wait(rpc.stub.BuildIndex, request, _BUILD_TIMEOUT_SECONDS)
        )
    refs = tuple(wire.record_of(ArrayRef, ref) for ref in reply.arrays)
    with attached.noting_loss():
        arrays = attached.transport.arrays(refs)
    if corrupt := [
        ref.name
        for ref in refs
        if ref.name in arrays and xxh3_64_intdigest(arrays[ref.name].data) != ref.checksum
    ]:
        raise CorruptRows(
            f"the {', '.join(corrupt)} of an index are not what was trained: test the store's memory"
        )
    kind = wire.KIND_NAMES.get(reply.kind, "")
    return IndexSegment(kind, arrays, reply.training_seconds, reply.iterations)
