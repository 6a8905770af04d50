"""Turns at something that many callers want at once."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count


@dataclass(slots=True)
class _Line:
    """The waiting work of one caller. had: size of the work that it had turns for, on the clock of all lines."""

    had: int
    waiting: list[tuple[bool, int, int, int, asyncio.Future[None]]] = field(default_factory=list)


class FairTurns:
    """Gives `num_turns` turns at once, for use in one event loop.

    A free turn goes to the caller that has had the least, measured by the size of its work. Among the work of one
    caller what was begun comes first, then the smallest, but later work of a caller passes a piece only up to the size
    of that piece.
    """

    def __init__(self, num_turns: int) -> None:
        self._num_free = num_turns
        self._lines: dict[bytes, _Line] = {}
        # what the caller had that was served last: a caller without waiting work begins there, and saves up nothing
        self._clock = 0
        self._numbers = count()

    @asynccontextmanager
    async def turn(self, caller: bytes, size: int) -> AsyncIterator[None]:
        """Hold a turn for work of this size."""
        await self.take(caller, size)
        try:
            yield
        finally:
            self.give_back()

    async def take(self, caller: bytes, size: int, is_begun: bool = False) -> None:
        """Wait for a turn, which lasts until `give_back`. is_begun: it ends work that had turns before."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(caller, _Line(self._clock))
        if not line.waiting:
            line.had = max(line.had, self._clock)
        heapq.heappush(line.waiting, (not is_begun, line.had + size, next(self._numbers), size, granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        """End a turn."""
        self._num_free += 1
        self._grant()

    def _grant(self) -> None:
        while self._num_free:
            waiting = [line for line in self._lines.values() if line.waiting]
            if not waiting:
                # no competition, so no account of it
                self._lines.clear()
                return
            line = min(waiting, key=lambda each: each.had)
            *_, size, granted = heapq.heappop(line.waiting)
            if not granted.cancelled():
                self._clock = line.had
                line.had += size
                self._num_free -= 1
                granted.set_result(None)
