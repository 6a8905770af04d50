"""A caller's conversations and documents in the KV store: to list, to warm, to pin and to drop.

Nothing is remembered here: the store knows the sessions, and the ids that callers gave them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from carrel.process.request_limits import MAX_SESSION_CHARS
from gateway.admission import Admission
from gateway.errors import InvalidRequest, StoreUnavailable, UnknownSession
from gateway.exchange import Completed, Event, Usage
from gateway.prompts import check_text
from gateway.worker_client import WorkerClient
from gateway.worker_status import WorkerStatus
from gpu_worker.v1 import gpu_worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Warmed:
    """The cost of warming a session: cached_tokens of prompt_tokens were known before."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float


def check_session_id(session_id: str) -> str:
    """The id. Raises InvalidRequest."""
    check_text(session_id, "session_id")
    if not 0 < len(session_id) <= MAX_SESSION_CHARS:
        raise InvalidRequest(f"A session's id has 1 to {MAX_SESSION_CHARS} characters.", "session_id")
    return session_id


class Sessions:
    """Every method shows and changes the caller's own only. Raises ServiceErrors, StoreUnavailable within a second."""

    def __init__(self, worker: WorkerClient, status: WorkerStatus, admission: Admission) -> None:
        self._worker = worker
        self._status = status
        self._admission = admission

    async def list(self, caller: bytes) -> tuple[pb.Session, ...]:
        """All of the caller's, the one that was used last first."""
        with self._admission.place(caller):
            reply = await self._list(pb.ListSessionsRequest(prefix_salt=caller))
        return tuple(reversed(reply.sessions))

    async def get(self, caller: bytes, session_id: str) -> pb.Session:
        """Raises UnknownSession."""
        request = pb.ListSessionsRequest(prefix_salt=caller, session_id=session_id)
        with self._admission.place(caller):
            reply = await self._list(request)
        if not reply.sessions:
            raise UnknownSession(session_id)
        return reply.sessions[0]

    async def warm(self, events: AsyncGenerator[Event, None], caller: bytes, session_id: str) -> Warmed:
        """Run a request of this session to its end. Raises InvalidRequest if its prompt is not held then."""
        request = pb.ListSessionsRequest(prefix_salt=caller, session_id=session_id)
        started_at, usage = time.monotonic(), Usage(0, 0, 0.0, None)
        async with aclosing(events):
            # where the store is away nothing is computed in vain
            before = await self._list(request)
            async for event in events:
                match event:
                    case Completed(usage=usage):
                        pass
        seconds = time.monotonic() - started_at
        after = await self._list(request)
        is_anew = _last_used_at(after) > _last_used_at(before)
        if not is_anew or after.sessions[0].tokens <= usage.prompt_tokens - after.slab_tokens:
            raise _not_kept(usage, after)
        return Warmed(usage.prompt_tokens, usage.cached_tokens, seconds)

    async def pin(self, caller: bytes, session_id: str, pinned: bool, seconds: float) -> None:
        """Evict it after all that are not pinned, for so long, 0: until it is unpinned; or no longer. Raises
        UnknownSession, InvalidRequest beyond the caller's limit."""
        request = pb.PinSessionRequest(
            prefix_salt=caller, session_id=session_id, pinned=pinned, seconds=seconds
        )
        with self._admission.place(caller), _of_sessions():
            await self._status.info()
            found = (await self._worker.pin_session(request)).found
        if not found:
            raise UnknownSession(session_id)

    async def drop(self, caller: bytes, session_id: str) -> None:
        """Forget it, and free what it holds. Raises UnknownSession."""
        request = pb.DropSessionRequest(prefix_salt=caller, session_id=session_id)
        with self._admission.place(caller), _of_sessions():
            await self._status.info()
            found = (await self._worker.drop_session(request)).found
        if not found:
            raise UnknownSession(session_id)

    async def _list(self, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        with _of_sessions():
            await self._status.info()
            return await self._worker.list_sessions(request)


@contextmanager
def _of_sessions() -> Iterator[None]:
    try:
        yield
    except StoreUnavailable as error:
        raise StoreUnavailable(
            "The KV store, which holds the sessions, does not answer. Try again."
        ) from error


def _last_used_at(reply: pb.ListSessionsResponse) -> float:
    return max((session.last_used_at for session in reply.sessions), default=0.0)


def _not_kept(usage: Usage, reply: pb.ListSessionsResponse) -> InvalidRequest:
    """Why the session does not hold the prompt, as far as it shows."""
    policy = "its policy" if usage.worker is None else f"the policy {usage.worker.policy!r}"
    if usage.prompt_tokens < reply.slab_tokens:
        reason = f"a session holds whole slabs, of {reply.slab_tokens} tokens each. Send a longer prompt."
    elif any(session.pinned for session in reply.sessions):
        reason = (
            "the session is pinned and would pass what one caller may pin, so it holds what it held. Unpin it, or "
            "another."
        )
    else:
        reason = (
            f"{policy} or the server shares no prefixes, or the KV store has no room. Choose another carrel.policy, "
            "or start the server with a larger --arena-bytes."
        )
    return InvalidRequest(
        f"The prompt of {usage.prompt_tokens} tokens was computed, but is not kept: {reason}",
        "prompt",
        "session_not_kept",
    )
