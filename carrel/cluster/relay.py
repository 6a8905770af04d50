"""A worker's stream, cut into frames: messages that have gathered go together, with heartbeats when there are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable

import grpc

from carrel.cluster.messages import Failure, Frame
from carrel.process.request_limits import CODE_KEY, PARAM_KEY
from carrel.process.trailing import trailing_of

BEAT_S = 1.0
# events that wait to be taken; the worker waits when there are more
MAX_WAITING = 256


async def relay(
    events: AsyncIterable[bytes], replica: str, beat_s: float = BEAT_S
) -> AsyncGenerator[Frame, None]:
    """Frames of `events`; the first is empty and comes at once, to name the replica that took the request."""
    waiting: asyncio.Queue[bytes | Failure | None] = asyncio.Queue(MAX_WAITING)
    reader = asyncio.create_task(_read(events, waiting))
    try:
        yield Frame(replica)
        is_last = False
        while not is_last:
            frame = await _next_frame(waiting, replica, beat_s)
            is_last = frame.is_last
            yield frame
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _read(events: AsyncIterable[bytes], waiting: asyncio.Queue[bytes | Failure | None]) -> None:
    try:
        async for event in events:
            await waiting.put(event)
        await waiting.put(None)
    except grpc.aio.AioRpcError as exc:
        await waiting.put(failure_of(exc))


async def _next_frame(waiting: asyncio.Queue[bytes | Failure | None], replica: str, beat_s: float) -> Frame:
    try:
        async with asyncio.timeout(beat_s):
            item = await waiting.get()
    except TimeoutError:
        return Frame(replica)
    events: list[bytes] = []
    while True:
        match item:
            case bytes():
                events.append(item)
            case failure:
                return Frame(replica, tuple(events), is_last=True, failure=failure)
        if waiting.empty():
            return Frame(replica, tuple(events))
        item = waiting.get_nowait()


def failure_of(exc: grpc.aio.AioRpcError) -> Failure:
    trailing = trailing_of(exc)
    return Failure(exc.code().name, exc.details() or "", trailing.get(PARAM_KEY), trailing.get(CODE_KEY))
