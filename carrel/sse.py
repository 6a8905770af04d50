"""OpenAI's streams as every client of ours reads them: one JSON value per server-sent event, up to [DONE]."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from httpx_sse import EventSource

DONE = "[DONE]"


def chunks(response: httpx.Response) -> Iterator[Any]:
    """Raises httpx.HTTPError for a broken stream and for an answer that is none, ValueError for what is not JSON."""
    for event in EventSource(response).iter_sse():
        if event.data == DONE:
            return
        yield event.json()


async def achunks(response: httpx.Response) -> AsyncIterator[Any]:
    """As `chunks`, of an asynchronous client."""
    async for event in EventSource(response).aiter_sse():
        if event.data == DONE:
            return
        yield event.json()
