"""Many replicas, seen by the gateway as one worker."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import grpc
from google.protobuf.message import Message

from carrel.cluster.census import Census
from carrel.cluster.fleet import Fleet
from carrel.cluster.messages import Failure, Frame, ReplicaLost
from carrel.cluster.routing import Routing, prompt_chain, session_link
from carrel.cluster.sums import all_stores
from carrel.process.request_context import trace_metadata
from gateway.errors import Overloaded, ServiceError, WorkerUnavailable
from gateway.rest.feed import Feed
from gateway.worker_client import status_error
from gpu_worker.v1 import gpu_worker_pb2 as pb

# a replica gives a sign of life every second; one that is silent for longer has lost what it ran
SILENCE_S = 4.0
# a request of which nothing has been answered goes to another replica, so often
MAX_TRIES = 3


class ClusterWorkerClient:
    """A WorkerClient. `census` must be kept up to date meanwhile."""

    def __init__(self, fleet: Fleet, census: Census, routing: Routing, silence_s: float = SILENCE_S) -> None:
        self._fleet = fleet
        self._census = census
        self._routing = routing
        self._silence_s = silence_s
        self._replica_of: dict[str, str] = {}

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        links = prompt_chain(request.prefix_salt, request.prompt_token_ids, request.cache_salt)
        deadline = time.monotonic() + timeout_s
        lost: tuple[str, ...] = ()
        while True:
            has_token = False
            attempt = self._attempt(request, links, deadline, lost)
            try:
                async for event in attempt:
                    has_token = has_token or event.HasField("token")
                    yield event
                return
            except ReplicaLost as error:
                lost = (*lost, error.replica)
                self._census.suspect(error.replica)
                if has_token or len(lost) == MAX_TRIES:
                    raise WorkerUnavailable("The replica that ran this request was lost.") from error
            finally:
                await attempt.aclose()

    async def abort(self, request_id: str) -> None:
        if (replica := self._replica_of.get(request_id)) is not None:
            try:
                await self._fleet.abort(replica, request_id)
            except ReplicaLost as exc:
                raise WorkerUnavailable() from exc

    async def info(self) -> pb.GetInfoResponse:
        for report in self._census.reports():
            if report.info is not None:
                return report.info
        raise WorkerUnavailable("No replica is ready yet.")

    async def stats(self) -> pb.StatsResponse:
        if (stats := self._census.stats()) is None:
            raise WorkerUnavailable("No replica is ready yet.")
        return stats

    async def store_stats(self) -> pb.StoreStatsResponse:
        """All stores together, as one."""
        replies = await self._ask_all("StoreStats", pb.StoreStatsRequest())
        return all_stores(map(pb.StoreStatsResponse.FromString, replies))

    async def list_sessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        """List the sessions of all replicas. A session that has moved is listed as its last replica holds it."""
        latest: dict[str, pb.Session] = {}
        replies = [
            pb.ListSessionsResponse.FromString(reply)
            for reply in await self._ask_all("ListSessions", request)
        ]
        sessions = [session for reply in replies for session in reply.sessions]
        for session in sorted(sessions, key=lambda each: each.last_used_at):
            latest.pop(session.session_id, None)
            latest[session.session_id] = session
        return pb.ListSessionsResponse(sessions=latest.values(), slab_tokens=replies[0].slab_tokens)

    async def pin_session(self, request: pb.PinSessionRequest) -> pb.PinSessionResponse:
        replies = map(pb.PinSessionResponse.FromString, await self._ask_all("PinSession", request))
        return pb.PinSessionResponse(found=any([reply.found for reply in replies]))

    async def drop_session(self, request: pb.DropSessionRequest) -> pb.DropSessionResponse:
        replies = map(pb.DropSessionResponse.FromString, await self._ask_all("DropSession", request))
        return pb.DropSessionResponse(found=any([reply.found for reply in replies]))

    async def is_serving(self) -> bool:
        if not self._census.reports():
            raise WorkerUnavailable("No replica is there.")
        return bool(self._census.serving())

    async def _ask_all(self, method: str, request: Message) -> list[bytes]:
        """Every worker's reply; the first failure is raised. What a replica held that is gone is gone with it."""
        try:
            replies = await self._fleet.ask_all(method, request.SerializeToString())
        except ReplicaLost as exc:
            raise WorkerUnavailable("The replicas do not answer.") from exc
        if not replies:
            raise WorkerUnavailable("No replica is there.")
        found = []
        for reply in replies:
            match reply:
                case Failure(status=grpc.StatusCode.DEADLINE_EXCEEDED.name):
                    raise WorkerUnavailable("A model worker does not answer.")
                case Failure(status=status, details=details, param=param, code=code):
                    raise status_error(grpc.StatusCode[status], details, 0.0, param, code)
                case _:
                    found.append(reply)
        return found

    async def _attempt(
        self, request: pb.GenerateRequest, links: tuple[bytes, ...], deadline: float, lost: tuple[str, ...]
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """One try. Raises ReplicaLost with the name of the replica that has, or was to have, the request."""
        replicas = [name for name in self._census.serving() if name not in lost]
        if not replicas:
            raise WorkerUnavailable("No replica serves now.")
        session = session_link(request.prefix_salt, request.session_id)
        route = self._routing.choose(links, replicas, session)
        if route is None:
            raise Overloaded("All replicas have as many requests as they take.")
        timeout_s = deadline - time.monotonic()
        frames = Feed(
            self._fleet.generate(
                request.SerializeToString(), timeout_s, route.replica, lost, trace_metadata()
            )
        )
        replica, has_left = route.replica, False
        try:
            first = await _next(frames, self._silence_s)
            self._routing.taken(route, links, first.replica, session)
            replica = first.replica
            self._replica_of[request.request_id] = replica
            complete: pb.GenerateResponse | None = None
            while True:
                frame = await _next(frames, self._silence_s)
                for event in map(pb.GenerateResponse.FromString, frame.events):
                    if event.HasField("complete"):
                        # sent at the end of the stream: a reader stops at it
                        complete = event
                    else:
                        yield event
                if frame.failure is not None and complete is None:
                    raise _error_of(frame.failure, replica, timeout_s)
                if frame.is_last:
                    # before its end is told: who hears of that may ask again at once, and finds the place free
                    self._routing.ended(replica)
                    has_left = True
                    if complete is not None:
                        yield complete
                    return
        except (ReplicaLost, TimeoutError) as exc:
            raise ReplicaLost(replica) from exc
        finally:
            if not has_left:
                self._routing.ended(replica)
            self._replica_of.pop(request.request_id, None)
            await frames.close()


async def _next(frames: Feed[Frame], timeout_s: float) -> Frame:
    """Raises TimeoutError when none comes in time, ReplicaLost when the frames end without a last one."""
    if not await frames.wait(timeout_s):
        raise TimeoutError
    frame = await frames.take()
    if frame is None:
        raise ReplicaLost
    return frame


def _error_of(failure: Failure, replica: str, timeout_s: float) -> ServiceError | ReplicaLost:
    status = grpc.StatusCode[failure.status]
    if status is grpc.StatusCode.UNAVAILABLE:
        return ReplicaLost(replica)
    return status_error(status, failure.details, timeout_s, failure.param, failure.code)
