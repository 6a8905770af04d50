"""The taking side of a move: all of a prefix is here afterwards, or nothing has changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from carrel.process.version import Edition
from kv_store.client import wire
from kv_store.client.layout import SlabGeometry
from kv_store.client.records import PulledPrefix
from kv_store.client.requests import pull_seconds
from kv_store.errors import FailedPrecondition, Overloaded, PeerFailed
from kv_store.moves.landing import Landing
from kv_store.moves.peer import PeerAddress, PeerStream
from kv_store.prefixes import check_hashes
from kv_store.state import StoreState
from kv_store.v1 import kv_store_pb2 as pb

MAX_PULLS = 4

Slabs = npt.NDArray[np.int32]
# Takes what is to be called when nobody waits for the prefix any more; false where that is so already.
OnEnd = Callable[[Callable[[], None]], bool]


class PrefixPuller:
    """Copies prefixes from other stores. token: that they ask for. max_pulls: at once."""

    def __init__(
        self, state: StoreState, edition: Edition, token: str = "", max_pulls: int = MAX_PULLS
    ) -> None:
        self._state = state
        self._edition = edition
        self._token = token
        self._permits = threading.BoundedSemaphore(max_pulls)

    def pull(
        self,
        epoch: int,
        worker_id: str,
        source: str,
        hashes: Sequence[bytes],
        timeout_seconds: float,
        on_end: OnEnd,
    ) -> PulledPrefix:
        """Fetch what is missing here of the prefix and known there, and list it for reuse.

        Raises PeerFailed when the source fails, refuses, or sends what fails its checksums; OutOfSpace before a byte is
        sent; FailedPrecondition, InvalidArgument, Overloaded.
        """
        check_hashes(hashes)
        address = PeerAddress(source)
        pull_seconds(timeout_seconds)
        with self._permit(), contextlib.ExitStack() as stack:
            geometry, known = self._hold_known(stack, epoch, worker_id, hashes)
            per_slab, num_known = geometry.tokens_per_slab, known.shape[1]
            if num_known == len(hashes):
                return PulledPrefix(num_known * per_slab, 0, 0)
            request = pb.ReadPrefixRequest(
                edition=wire.edition_to_message(self._edition),
                layout=wire.layout_to_message(geometry.layout),
                tokens_per_slab=per_slab,
                prefix_hashes=hashes,
                num_known=num_known,
            )
            stream = stack.enter_context(PeerStream(address, self._token, request, timeout_seconds))
            if not on_end(stream.cancel):
                stream.cancel()
            header = stream.header()
            if header.num_found <= num_known:
                return PulledPrefix(num_known * per_slab, 0, 0)
            with stream.naming():
                num_found = _checked(header.num_found, len(hashes))
            slabs = self._take_slabs(stack, epoch, worker_id, geometry, num_found - num_known)
            landing = Landing(self._state, geometry, slabs)
            with stream.naming():
                _receive(stream, header.num_bytes, landing)
            with self._state.lock:
                self._check(epoch, worker_id, geometry)
                self._state.allocator.seal(slabs.ravel())
                table = np.concatenate([known, slabs], axis=1)
                self._state.prefixes.publish(hashes[:num_found], table)
            return PulledPrefix(num_found * per_slab, (num_found - num_known) * per_slab, landing.num_bytes)

    @contextlib.contextmanager
    def _permit(self) -> Iterator[None]:
        if not self._permits.acquire(blocking=False):
            raise Overloaded("too many prefixes are being moved here: try again later")
        try:
            yield
        finally:
            self._permits.release()

    def _hold_known(
        self, stack: contextlib.ExitStack, epoch: int, worker_id: str, hashes: Sequence[bytes]
    ) -> tuple[SlabGeometry, Slabs]:
        """What is here already, int32 [num_layers, n], kept from eviction until the stack unwinds."""
        state = self._state
        with state.lock:
            state.enter(epoch, worker_id)
            geometry, found = state.geometry, state.prefixes.lookup(hashes)
            empty = np.empty((geometry.layout.num_layers, 0), np.int32)
            known = np.stack(found, axis=1) if found else empty
            state.allocator.retain(known.ravel())
            stack.callback(self._release, known)
        return geometry, known

    def _take_slabs(
        self, stack: contextlib.ExitStack, epoch: int, worker_id: str, geometry: SlabGeometry, count: int
    ) -> Slabs:
        """New slabs int32 [num_layers, count], given back when the stack unwinds: who lists them holds them too."""
        state, num_layers = self._state, geometry.layout.num_layers
        with state.lock:
            self._check(epoch, worker_id, geometry)
            what = f"{count * geometry.tokens_per_slab} tokens of a prefix from another store"
            state.make_room(count * num_layers, what)
            slabs = np.array([state.allocator.allocate(count) for _ in range(num_layers)], np.int32)
            stack.callback(self._release, slabs)
        return slabs

    def _release(self, slabs: Slabs) -> None:
        with self._state.lock:
            self._state.allocator.release(slabs.ravel())

    def _check(self, epoch: int, worker_id: str, geometry: SlabGeometry) -> None:
        """Raises FailedPrecondition once the worker is gone, or slabs are cut for another layout."""
        self._state.enter(epoch, worker_id)
        if self._state.geometry is not geometry:
            raise FailedPrecondition("the arena was given another layout meanwhile")


def _checked(num_found: int, num_hashes: int) -> int:
    if num_found > num_hashes:
        raise PeerFailed(f"it found {num_found} of {num_hashes} hashes")
    return num_found


def _receive(stream: PeerStream, announced: int, landing: Landing) -> None:
    """Read the stream to its end. Raises PeerFailed."""
    if announced != landing.num_bytes:
        raise PeerFailed(f"it announced {announced} bytes where {landing.num_bytes} were expected")
    for chunk in stream.chunks():
        landing.write(chunk.data, chunk.checksum)
    landing.finish(stream.digest)
