"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gateway.records import Event

MAX_PENDING_EVENTS = 64


async def merge(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """Events of all streams as they come, each stream's in order. The first error ends all of them, and so does
    closing the merged stream. A reader that lags stops the streams once `MAX_PENDING_EVENTS` wait.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for event in stream:
                yield event
        return
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(MAX_PENDING_EVENTS)

    async def pump(stream: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put(event)
        except Exception as error:
            # raised again by the reader
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_open = len(streams)
        while num_open:
            match await queue.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case event:
                    yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
