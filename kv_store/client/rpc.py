"""Calls to the store with a deadline; gRPC's errors become ours here and nowhere else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import grpc

from carrel.process.trace_context import TRACEPARENT, TraceContext
from carrel.process.trailing import trailing_of
from carrel.process.version import Edition
from kv_store.client import wire
from kv_store.client.errors import (
    InvalidStoreRequest,
    NotInStore,
    PrefixLoading,
    StaleEpoch,
    StoreError,
    StoreFull,
    StoreSilent,
    StoreUnreachable,
    TokenRefused,
    VersionMismatch,
)
from kv_store.v1 import kv_store_pb2 as pb
from kv_store.v1 import kv_store_pb2_grpc

Options = Sequence[tuple[str, int]]


def open_channel(target: str, options: Options, root: bytes = b"") -> grpc.Channel:
    """A channel to `target`. root: PEM certificates by which the store's is known, which must be for the host's name;
    empty: without TLS."""
    if not root:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(root), options=options)


Reply = TypeVar("Reply")

MAX_MESSAGE_BYTES = 16 << 20
# Rows come at least so fast from a store that works, over the slowest network that is of use.
LEAST_BYTES_PER_SECOND = 32 << 20
TOKEN_KEY = "authorization"
# In the trailing metadata of a store that is full.
MISSING_BYTES_KEY = "carrel-missing-bytes"
# By a sequence's id.
TraceOf = Callable[[str], TraceContext | None]
# gRPC's own words for a method that the other side does not have.
_UNKNOWN_METHOD = "Method not found!"
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A restarted store should be seen within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # The token is for the store alone: no proxy comes between.
    ("grpc.enable_http_proxy", 0),
    # Two clients of one process must not share a connection's fate.
    ("grpc.use_local_subchannel_pool", 1),
)
# Also the statuses by which the store ends calls.
ERRORS: dict[grpc.StatusCode, type[StoreError]] = {
    grpc.StatusCode.UNAVAILABLE: StoreUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: StoreSilent,
    grpc.StatusCode.CANCELLED: StoreUnreachable,
    grpc.StatusCode.FAILED_PRECONDITION: StaleEpoch,
    grpc.StatusCode.RESOURCE_EXHAUSTED: StoreFull,
    grpc.StatusCode.ABORTED: PrefixLoading,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidStoreRequest,
    grpc.StatusCode.NOT_FOUND: NotInStore,
    grpc.StatusCode.UNAUTHENTICATED: TokenRefused,
    grpc.StatusCode.UNIMPLEMENTED: VersionMismatch,
}


def no_trace(sequence_id: str) -> None:
    """None."""


def refusal(store: Edition) -> str | None:
    """Why we must not talk to a store of this edition; None where we may."""
    return wire.own_edition().refusal("this client", "the store", store)


@contextlib.contextmanager
def translated(target: str) -> Iterator[None]:
    """Raise the StoreError that a gRPC failure stands for."""
    try:
        yield
    except grpc.RpcError as exc:
        status, details = exc.code(), exc.details()
        if status is grpc.StatusCode.UNIMPLEMENTED and details == _UNKNOWN_METHOD:
            details = refusal(Edition("", ""))
        kind, text = ERRORS.get(status, StoreError), details or status.name
        if kind is StoreFull:
            raise StoreFull(text, target, int(trailing_of(exc).get(MISSING_BYTES_KEY, 0))) from exc
        raise kind(text, target) from exc
    except ValueError as exc:
        # gRPC's way to say that the channel was closed by our own `close` or `reattach`.
        raise StoreUnreachable(str(exc), target) from exc


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that shows the token to the store; none without a token."""
    return ((TOKEN_KEY, f"Bearer {token}"),) if token else ()


class StoreRpc:
    """One channel. Every call has a deadline, shows the token and raises StoreError only.

    After a deadline that passed the store is silent: each `call` and `read_stream` raises StoreSilent at once, so that
    nobody waits twice, until it answers a `beat`.
    """

    def __init__(
        self,
        target: str,
        timeout_seconds: float,
        token: str = "",
        interceptors: Sequence[grpc.UnaryUnaryClientInterceptor] = (),
        root: bytes = b"",
        trace_of: TraceOf = no_trace,
    ) -> None:
        """timeout_seconds: the deadline of a call, beside the time that its rows take. root: see `open_channel`.
        trace_of: the trace that a sequence's calls are part of, by its id."""
        self.target = target
        self._metadata = token_metadata(token)
        self._trace_of = trace_of
        self.timeout_seconds = timeout_seconds
        self._is_silent = False
        self._answered_at = time.monotonic()
        self._channel = open_channel(target, _OPTIONS, root)
        calls = grpc.intercept_channel(self._channel, *interceptors) if interceptors else self._channel
        self.stub = kv_store_pb2_grpc.KVStoreStub(calls)

    @property
    def silent_seconds(self) -> float:
        """Since the last beat that was answered, while the store is silent; else 0."""
        return time.monotonic() - self._answered_at if self._is_silent else 0.0

    def check(self, edition: pb.Edition) -> None:
        """Raises VersionMismatch for another edition than ours."""
        if reason := refusal(wire.record_of(Edition, edition)):
            raise VersionMismatch(reason, self.target)

    def attach(self, request: pb.AttachRequest, timeout_seconds: float) -> pb.AttachResponse:
        """Waits so long for the store to come up. A layout that the store does not hold is InvalidStoreRequest; raises
        VersionMismatch."""
        try:
            with translated(self.target):
                reply = self.stub.Attach(
                    request, timeout=timeout_seconds, wait_for_ready=True, metadata=self._metadata
                )
        except StaleEpoch as exc:
            raise InvalidStoreRequest(exc.text, self.target) from exc
        self.check(reply.edition)
        return reply

    def call(self, method: Callable[..., Reply], request: Any, num_bytes: int = 0) -> Reply:
        """The reply. num_bytes: of rows that are moved until it comes."""
        with self._in_time():
            return method(request, timeout=self._deadline(num_bytes), metadata=self._metadata_of(request))

    def wait(self, method: Callable[..., Reply], request: Any, timeout_seconds: float) -> Reply:
        """The reply to a call that may take long, for a thread that may wait; also of a store that is silent now."""
        try:
            with translated(self.target):
                return method(request, timeout=timeout_seconds, metadata=self._metadata_of(request))
        except StoreSilent as exc:
            raise StoreUnreachable(str(exc)) from exc

    def beat(self, request: pb.HeartbeatRequest) -> None:
        """Ask whether the store is there, whatever was known of it."""
        try:
            with translated(self.target):
                self.stub.Heartbeat(request, timeout=self.timeout_seconds, metadata=self._metadata)
        except StoreSilent:
            self._is_silent = True
            raise
        except StoreError:
            self._is_silent = False
            raise
        self._answered_at = time.monotonic()
        self._is_silent = False

    def read_stream(
        self, method: Callable[..., Iterable[pb.RowsChunk]], request: Any, most_bytes: int
    ) -> bytes:
        """The stream's bytes. Raises StoreError once there are more than `most_bytes`."""
        chunks, num_bytes = [], 0
        with self._in_time():
            for chunk in method(request, timeout=self._deadline(most_bytes), metadata=self._metadata):
                num_bytes += len(chunk.data)
                if num_bytes > most_bytes:
                    raise StoreError(f"more than the {most_bytes} bytes asked for came", self.target)
                chunks.append(chunk.data)
        return b"".join(chunks)

    def _metadata_of(self, request: Any) -> tuple[tuple[str, str], ...]:
        """Calls for several sequences belong to no trace."""
        trace = self._trace_of(getattr(request, "sequence_id", ""))
        return self._metadata if trace is None else (*self._metadata, (TRACEPARENT, str(trace)))

    def _deadline(self, num_bytes: int) -> float:
        return self.timeout_seconds + num_bytes / LEAST_BYTES_PER_SECOND

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        if self._is_silent:
            raise StoreSilent(f"KV store at {self.target}: it does not answer")
        try:
            with translated(self.target):
                yield
        except StoreSilent:
            self._is_silent = True
            raise

    def close(self) -> None:
        self._channel.close()


def check_edition(target: str, timeout_seconds: float, token: str = "", root: bytes = b"") -> None:
    """Ask the store at `target` what it is. Raises VersionMismatch, StoreUnreachable, TokenRefused."""
    rpc = StoreRpc(target, timeout_seconds, token, root=root)
    try:
        own = wire.edition_to_message(wire.own_edition())
        rpc.check(rpc.call(rpc.stub.Hello, pb.HelloRequest(edition=own)).edition)
    finally:
        rpc.close()
