"""How many requests run at once, and the end of admission when the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import Overloaded, ShuttingDown


class Admission:
    """A bounded count of running requests. Nothing waits here: the worker has the queue."""

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0
        self.is_draining = False

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold one place. Raises Overloaded or ShuttingDown."""
        if self.is_draining:
            raise ShuttingDown()
        if self.num_running >= self._max_concurrent:
            raise Overloaded(f"{self.num_running} requests are running, the most that this server takes.")
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing more and wait for what runs. Returns whether all of it ended in time."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
