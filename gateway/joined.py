"""One call for all that ask for the same thing at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Joined(Generic[T]):
    """An asynchronous function of no arguments that runs once at a time: a call during a run gets the run's result."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._running: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """The result. Raises what the function raises."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._ask())
        # one that leaves does not end it for the others
        return await asyncio.shield(self._running)
