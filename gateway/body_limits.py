"""How much of a request's body is read, and memory for the bodies that are being received."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from carrel.process.fair_turns import FairTurns
from gateway.errors import Overloaded, ServiceError, TooLarge, TooManyRequests, WorkerUnavailable
from gateway.heavy_work import HeavyWork
from gateway.worker_status import WorkerStatus

# of the room, that one owner may have
OWNERS_SHARE = 4
# seconds that a body waits for room
PATIENCE_S = 10.0


@dataclass(eq=False, slots=True)
class Waiting:
    """A body without room yet."""

    num_bytes: int
    granted: asyncio.Future[None]
    has_room: bool = False


class BodyRoom:
    """Bytes of bodies, from before the first one is read until the body is parsed: in all, and of one owner a quarter.

    An owner is an API key, or where the API is open a client's address. A body without room waits and is not read, so
    that it stays with its client; each owner has a line of its own. A body larger than a share has room when it is the
    only one of its owner, and one larger than all when it is the only one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._taken: Counter[bytes] = Counter()
        self._lines: dict[bytes, deque[Waiting]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken now."""
        return self._taken.total()

    @asynccontextmanager
    async def taken(self, owner: bytes, num_bytes: int) -> AsyncIterator[None]:
        """Hold room for a body within. Raises TooManyRequests or Overloaded when none came free in time."""
        await self._take(owner, num_bytes)
        try:
            yield
        finally:
            self._give_back(owner, num_bytes)

    async def _take(self, owner: bytes, num_bytes: int) -> None:
        body = Waiting(num_bytes, asyncio.get_running_loop().create_future())
        self._lines.setdefault(owner, deque()).append(body)
        self._serve()
        try:
            async with asyncio.timeout(PATIENCE_S):
                if not body.has_room:
                    await body.granted
        except BaseException as exc:
            if body.has_room:
                self._give_back(owner, num_bytes)
            else:
                self._leave(owner, body)
            if isinstance(exc, TimeoutError):
                raise self._refusal(owner, num_bytes) from exc
            raise

    def _leave(self, owner: bytes, body: Waiting) -> None:
        line = self._lines[owner]
        line.remove(body)
        if not line:
            del self._lines[owner]
        # a smaller one may have waited behind it
        self._serve()

    def _give_back(self, owner: bytes, num_bytes: int) -> None:
        self._taken[owner] -= num_bytes
        if not self._taken[owner]:
            del self._taken[owner]
        self._serve()

    def _serve(self) -> None:
        """Give room to the first of each line, in turns. The first that lacks room only because of other owners is
        waited for, so that small bodies do not keep a large one out."""
        for owner in list(self._lines):
            line = self._lines[owner]
            while line and self._has_share(owner, line[0].num_bytes):
                if self._taken and self._taken.total() + line[0].num_bytes > self._max_bytes:
                    return
                body = line.popleft()
                self._taken[owner] += body.num_bytes
                body.has_room = True
                if not body.granted.done():
                    body.granted.set_result(None)
            # behind the others at the next turn
            del self._lines[owner]
            if line:
                self._lines[owner] = line

    def _has_share(self, owner: bytes, num_bytes: int) -> bool:
        taken = self._taken.get(owner, 0)
        return not taken or taken + num_bytes <= self._max_bytes // OWNERS_SHARE

    def _refusal(self, owner: bytes, num_bytes: int) -> ServiceError:
        if self._has_share(owner, num_bytes):
            return Overloaded(
                f"{self.num_bytes} bytes of request bodies are being sent, and {self._max_bytes} is the most that this "
                "server receives at once: try again."
            )
        return TooManyRequests(
            f"{self._taken[owner]} bytes of other request bodies of this API key, or this address, are being sent, and "
            f"{self._max_bytes // OWNERS_SHARE} is the most at once: finish some first."
        )


# prompts in JSON with every character escaped fit: six bytes each, and a token has several
BYTES_PER_TOKEN = 32
MIN_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """max_token_ids: of a prompt, the model's maximum length; 0 until the worker has told it."""

    max_bytes: int
    max_token_ids: int

    def excess(self) -> ServiceError:
        """Return the error for a longer body."""
        if not self.max_token_ids:
            return WorkerUnavailable()
        return TooLarge(
            f"The request body exceeds {self.max_bytes} bytes. Send a shorter prompt, or raise --max-body-bytes."
        )


class BodyLimits:
    """The limits of one body, and of all that are being received. Must be built inside the event loop.

    turns: held while a body is parsed, one at a time and by turns of callers, so that the rest of the event loop runs
        between two bodies.
    work: runs in a thread what of parsing belongs there.
    room: memory for bodies until they are parsed.
    timeout_s: seconds in which a body must arrive, once it has room.
    """

    def __init__(
        self,
        status: WorkerStatus,
        max_bytes: int | None,
        work: HeavyWork,
        max_incoming_bytes: int,
        timeout_s: float,
    ) -> None:
        """max_bytes: None: what a prompt of the model's maximum length may need."""
        self._status = status
        self._max_bytes = max_bytes
        self.turns = FairTurns(1)
        self.work = work
        self.room = BodyRoom(max_incoming_bytes)
        self.timeout_s = timeout_s

    async def now(self) -> BodyLimit:
        """Before the first contact with the worker that of the shortest model."""
        try:
            longest = (self._status.latest or await self._status.info()).max_model_len
        except WorkerUnavailable:
            longest = 0
        return BodyLimit(self._max_bytes or max(MIN_BYTES, longest * BYTES_PER_TOKEN), longest)
