"""Tasks that several callers share, or that work ahead of their reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractContextManager, aclosing
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


async def read_ahead(
    events: AsyncGenerator[T, None], limit: int, guard: AbstractContextManager[None]
) -> AsyncGenerator[T, None]:
    """Yield `events` in order, with their error at the end; up to `limit` of them wait here to be read.

    `events` begin when this does. They are closed when they have ended, however much is still to be read, or when this
    is closed. guard: entered by the task that iterates `events`; its error takes the place of theirs.
    """
    waiting: asyncio.Queue[tuple[T | None, Exception | None]] = asyncio.Queue(limit)

    async def fill() -> None:
        error: Exception | None = None
        try:
            with guard:
                async with aclosing(events):
                    async for event in events:
                        await waiting.put((event, None))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as failure:
            # raised again by the reader
            error = failure
        except BaseException as failure:
            # a panic of a library in Rust: nobody who serves a request expects one
            error = RuntimeError(f"a panic: {failure}")
            error.__cause__ = failure
        await waiting.put((None, error))

    task = asyncio.create_task(fill())
    try:
        while (item := await waiting.get())[0] is not None:
            yield item[0]
        if item[1] is not None:
            raise item[1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
