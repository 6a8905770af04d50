"""Tell a busy worker from one that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from gateway.errors import ServiceError, WorkerUnavailable

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
