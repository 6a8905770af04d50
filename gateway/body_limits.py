"""How much of a request's body is read."""

from __future__ import annotations

from dataclasses import dataclass

from carrel.process.fair_turns import FairTurns
from gateway.body_room import BodyRoom
from gateway.errors import ServiceError, TooLarge, WorkerUnavailable
from gateway.heavy_work import HeavyWork
from gateway.worker_status import WorkerStatus

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
