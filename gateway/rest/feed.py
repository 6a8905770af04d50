"""Waiting for events without losing them, and for a client that may go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Generic, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection; an answer would not be read."""


class Feed(Generic[T]):
    """Items of a generator, such as a request's events. `wait` may time out any number of times: nothing is lost."""

    def __init__(self, events: AsyncGenerator[T, None]) -> None:
        self._events = events
        self._pending: asyncio.Task[T | None] | None = None

    async def wait(self, timeout_s: float) -> bool:
        """Return whether `take` would return at once."""
        done, _ = await asyncio.wait({self._next()}, timeout=timeout_s)
        return bool(done)

    async def take(self) -> T | None:
        """The next event; None at the end. Raises what the service raises."""
        event = await self._next()
        self._pending = None
        return event

    def check(self) -> None:
        """Raise the error that waits to be taken, if there is one."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    async def close(self) -> None:
        """End the request, wherever it is."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
        await self._events.aclose()

    def _next(self) -> asyncio.Task[T | None]:
        if self._pending is None:
            self._pending = asyncio.create_task(self._pull())
        return self._pending

    async def _pull(self) -> T | None:
        return await anext(self._events, None)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, or cancel it and raise ClientGone as soon as the client is gone."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
