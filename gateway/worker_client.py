"""The worker as the gateway sees it: calls, their errors, and telling a busy worker from one that hangs."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from carrel.process.certificates import Identity
from carrel.process.request_context import trace_metadata
from carrel.process.request_limits import CODE_KEY, PARAM_KEY
from carrel.process.trailing import trailing_of
from carrel.process.version import Edition, edition_of
from gateway.errors import (
    STORE_UNAVAILABLE,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    ServiceError,
    StoreUnavailable,
    VersionMismatch,
    WorkerUnavailable,
)
from gpu_worker.v1 import gpu_worker_pb2 as pb
from gpu_worker.v1 import gpu_worker_pb2_grpc as pb_grpc

T = TypeVar("T")

# it hangs if nothing was heard of it in so many looks, which are so far apart: new requests are refused within a second
LOOKS = 4
LOOK_S = 0.2


class Pulse:
    """The liveness of one worker. Every message from it is a sign of life; while a call waits, the worker is asked for
    one. Silence is counted in polls, not by the clock: a gateway that is held up itself has not listened."""

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        """ask: returns when the worker has answered, and raises ServiceErrors; must end."""
        self._ask = ask
        self._asked: asyncio.Task[None] | None = None
        self._num_beats = 0

    def beat(self) -> None:
        """The worker said something."""
        self._num_beats += 1

    async def wait(self, answer: Awaitable[T]) -> T:
        """The answer, for which a worker that lives may take its time. Raises WorkerUnavailable where it hangs, and
        what the answer raises."""
        waiting, silent, heard = asyncio.ensure_future(answer), 0, self._num_beats
        try:
            while not (await asyncio.wait({waiting}, timeout=LOOK_S))[0]:
                silent = silent + 1 if heard == self._num_beats else 0
                heard = self._num_beats
                if silent == LOOKS:
                    raise WorkerUnavailable("The model worker does not answer.")
                if self._asked is None or self._asked.done():
                    # once, however many wait
                    self._asked = asyncio.create_task(self._listen())
            return waiting.result()
        finally:
            waiting.cancel()

    async def _listen(self) -> None:
        with suppress(ServiceError):
            await self._ask()
            self.beat()


# of a worker that lives
CONTROL_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 1.0


@functools.cache
def own_edition() -> Edition:
    """Return the edition of this gateway, which works only with a worker of the same edition."""
    return edition_of(pb.DESCRIPTOR.serialized_pb)


class TokenSource(Protocol):
    """Token ids in, token ids out, by the worker's own messages. Every method raises ServiceErrors only."""

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The events of one request, a `complete` last. Closing the iterator frees the worker's room.

        Raises WorkerUnavailable within a second of the worker's last sign of life if it does not take the request."""

    async def abort(self, request_id: str) -> None:
        """End a request, which then still sends its `complete`."""


class WorkerClient(TokenSource, Protocol):
    """All that a worker is asked. One that hangs raises WorkerUnavailable within a second."""

    async def info(self) -> pb.GetInfoResponse:
        """Return the worker's constant description. Raises VersionMismatch for a worker of another version."""

    async def stats(self) -> pb.StatsResponse: ...

    async def store_stats(self) -> pb.StoreStatsResponse:
        """Return the store's statistics. Raises StoreUnavailable if it does not answer soon, as sessions do."""

    async def list_sessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        """A caller's."""

    async def pin_session(self, request: pb.PinSessionRequest) -> pb.PinSessionResponse:
        """Raises InvalidRequest beyond the caller's limit."""

    async def drop_session(self, request: pb.DropSessionRequest) -> pb.DropSessionResponse: ...

    async def is_serving(self) -> bool:
        """Return whether the worker's health says SERVING. Raises WorkerUnavailable when it does not answer."""


class GRPCWorkerClient:
    """One channel to one worker; must be built inside the event loop, and closed."""

    def __init__(self, target: str, identity: Identity | None = None) -> None:
        """identity: with it the worker is called over TLS, shown our certificate, and known by its own."""
        self._channel = _open_channel(target, identity)
        self._worker = pb_grpc.GPUWorkerStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._pulse = Pulse(self.is_serving)

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        call = self._worker.Generate(request, timeout=timeout_s, metadata=trace_metadata())
        try:
            # says at once that it is taken
            await self._pulse.wait(call.initial_metadata())
            async for response in call:
                self._pulse.beat()
                yield response
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc, timeout_s) from exc
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> None:
        await self._answer(
            self._worker.Abort(pb.AbortRequest(request_id=request_id), timeout=CONTROL_TIMEOUT_S)
        )

    async def info(self) -> pb.GetInfoResponse:
        info = await self._answer(self._worker.GetInfo(pb.GetInfoRequest(), timeout=CONTROL_TIMEOUT_S))
        other = Edition(info.version, info.messages)
        if reason := own_edition().refusal("The gateway", "the model worker", other):
            raise VersionMismatch(f"{reason}.")
        return info

    async def stats(self) -> pb.StatsResponse:
        return await self._answer(self._worker.Stats(pb.StatsRequest(), timeout=CONTROL_TIMEOUT_S))

    async def store_stats(self) -> pb.StoreStatsResponse:
        return await self._answer(self._worker.StoreStats(pb.StoreStatsRequest(), timeout=CONTROL_TIMEOUT_S))

    async def list_sessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        return await self._answer(self._worker.ListSessions(request, timeout=CONTROL_TIMEOUT_S))

    async def pin_session(self, request: pb.PinSessionRequest) -> pb.PinSessionResponse:
        return await self._answer(self._worker.PinSession(request, timeout=CONTROL_TIMEOUT_S))

    async def drop_session(self, request: pb.DropSessionRequest) -> pb.DropSessionResponse:
        return await self._answer(self._worker.DropSession(request, timeout=CONTROL_TIMEOUT_S))

    async def is_serving(self) -> bool:
        async with _translated():
            reply = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        await self._channel.close(None)

    async def _answer(self, call: Awaitable[T]) -> T:
        """A short call's."""
        async with _translated():
            return await self._pulse.wait(call)


def _open_channel(target: str, identity: Identity | None) -> grpc.aio.Channel:
    options = [
        # the worker is on this box or next to it: no proxy, and a quick look after a restart
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if identity is None:
        return grpc.aio.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(identity.root, identity.key, identity.certificate)
    return grpc.aio.secure_channel(target, credentials, options=options)


@asynccontextmanager
async def _translated() -> AsyncGenerator[None, None]:
    """A short control call: no answer in time means that the worker is not there."""
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        if exc.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise WorkerUnavailable("The model worker does not answer.") from exc
        raise error_of(exc, 0.0) from exc


def error_of(exc: grpc.aio.AioRpcError, timeout_s: float) -> ServiceError:
    """The gateway's error for a call that failed."""
    trailing = trailing_of(exc)
    return status_error(
        exc.code(), exc.details() or "", timeout_s, trailing.get(PARAM_KEY), trailing.get(CODE_KEY)
    )


def status_error(
    status: grpc.StatusCode, details: str, timeout_s: float, param: str | None = None, code: str | None = None
) -> ServiceError:
    """The one table from gRPC statuses to the gateway's errors.

    Only the text of statuses that the worker raises on purpose is passed on.
    """
    match status:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(details, param, code)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(details)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return VersionMismatch(details)
        case grpc.StatusCode.UNAVAILABLE:
            return StoreUnavailable() if code == STORE_UNAVAILABLE else WorkerUnavailable()
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return RequestTimeout(timeout_s)
        case grpc.StatusCode.ABORTED:
            return GenerationFailed(details)
        case _:
            return GenerationFailed()
