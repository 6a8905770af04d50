"""One replica: a worker and a store on one node, and the relay between them and the gateways."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

import grpc
import ray
from ray import serve

from carrel.cluster.messages import Failure, Frame, Report
from carrel.cluster.options import read_arguments
from carrel.cluster.services import ReplicaServices
from carrel.process.request_limits import CODE_KEY, PARAM_KEY
from carrel.process.trailing import trailing_of
from gateway.errors import ServiceError
from gateway.worker_client import GRPCWorkerClient
from gpu_worker.v1 import gpu_worker_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["GPUWorker"].full_name
GENERATE = f"/{SERVICE}/Generate"
# streams get their last frame before a replica ends itself
LAST_FRAMES_S = 1.0
STORE_CHECK_S = 5.0
# of a short call to the worker: within a second the gateway knows
ASK_S = 0.8

log = logging.getLogger(__name__)


class Replica:
    """A Serve deployment. It ends itself when its worker ends; Serve then starts another."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]
        resolved = read_arguments(arguments)
        warn_of_niceness(os.getpriority(os.PRIO_PROCESS, 0))
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._node = ray.get_runtime_context().get_node_id()
        self._services = await asyncio.to_thread(ReplicaServices, resolved, self._on_worker_death)
        target = f"unix:{self._services.endpoints.worker_socket}"
        self._worker = GRPCWorkerClient(target)
        self._channel = grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)])
        self._generate = self._channel.unary_stream(GENERATE, None, None)

    async def generate(
        self,
        request: bytes,
        timeout_s: float,
        wanted: str,
        lost: tuple[str, ...],
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> AsyncGenerator[Frame, None]:
        """The worker's answer to a serialised GenerateRequest; closing it frees the worker's room.

        `wanted` and `lost` are the router's; `metadata` is the call's to the worker.
        """
        call = self._generate(request, timeout=timeout_s, metadata=metadata)
        frames = relay(call, self._id)
        try:
            async for frame in frames:
                yield frame
        finally:
            call.cancel()
            await frames.aclose()

    async def abort(self, request_id: str, only: str) -> None:
        """End a request if it runs here; its stream still brings its account. `only` is the router's."""
        await self._worker.abort(request_id)

    async def ask(self, method: str, request: bytes) -> bytes | Failure:
        """The worker's reply to a short call, both serialised."""
        call = self._channel.unary_unary(f"/{SERVICE}/{method}", None, None)
        try:
            reply: bytes = await call(request, timeout=ASK_S)
        except grpc.aio.AioRpcError as exc:
            return failure_of(exc)
        return reply

    async def report(self) -> Report:
        try:
            is_serving = await self._worker.is_serving()
            info, stats = await self._worker.info(), await self._worker.stats()
            return Report(self._id, self._node, is_serving, info, stats)
        except ServiceError:
            return Report(self._id, self._node, is_serving=False)

    async def check_health(self) -> None:
        """Serve's probe. Raises while the worker or the store does not answer."""
        if not await self._worker.is_serving():
            raise RuntimeError("the worker does not serve")
        await asyncio.wait_for(self._services.store.ready.remote(), STORE_CHECK_S)

    async def __del__(self) -> None:
        # Serve calls it when the replica has drained, or when it did not start
        if not hasattr(self, "_services"):
            return
        await asyncio.to_thread(self._services.close)
        await self._worker.close()
        await self._channel.close(None)

    def _on_worker_death(self, reason: str) -> None:
        log.error("this replica ends: %s", reason)
        if hasattr(self, "_services"):
            time.sleep(LAST_FRAMES_S)
            self._services.close()
            os._exit(1)


def warn_of_niceness(niceness: int) -> None:
    """Worker and store inherit the replica's, which Ray sets, and cannot get a lower one back."""
    if niceness > 0:
        log.warning(
            "this replica has niceness %d, as Ray gives it to what it runs: on a busy node tokens come late; "
            "start Ray with RAY_worker_niceness=0 in its environment",
            niceness,
        )


BEAT_S = 1.0
# events that wait to be taken; the worker waits when there are more
MAX_WAITING = 256


async def relay(
    events: AsyncIterable[bytes], replica: str, beat_s: float = BEAT_S
) -> AsyncGenerator[Frame, None]:
    """Frames of `events`; the first is empty and comes at once, to name the replica that took the request."""
    waiting: asyncio.Queue[bytes | Failure | None] = asyncio.Queue(MAX_WAITING)
    reader = asyncio.create_task(_read(events, waiting))
    try:
        yield Frame(replica)
        is_last = False
        while not is_last:
            frame = await _next_frame(waiting, replica, beat_s)
            is_last = frame.is_last
            yield frame
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _read(events: AsyncIterable[bytes], waiting: asyncio.Queue[bytes | Failure | None]) -> None:
    try:
        async for event in events:
            await waiting.put(event)
        await waiting.put(None)
    except grpc.aio.AioRpcError as exc:
        await waiting.put(failure_of(exc))


async def _next_frame(waiting: asyncio.Queue[bytes | Failure | None], replica: str, beat_s: float) -> Frame:
    try:
        async with asyncio.timeout(beat_s):
            item = await waiting.get()
    except TimeoutError:
        return Frame(replica)
    events: list[bytes] = []
    while True:
        match item:
            case bytes():
                events.append(item)
            case failure:
                return Frame(replica, tuple(events), is_last=True, failure=failure)
        if waiting.empty():
            return Frame(replica, tuple(events))
        item = waiting.get_nowait()


def failure_of(exc: grpc.aio.AioRpcError) -> Failure:
    trailing = trailing_of(exc)
    return Failure(exc.code().name, exc.details() or "", trailing.get(PARAM_KEY), trailing.get(CODE_KEY))
