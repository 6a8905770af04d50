"""The way of a generation to its client, whole or as a stream, in the words of whichever API it was asked by."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.config import GatewayConfig
from gateway.errors import ServiceError
from gateway.exchange import Event, Generation
from gateway.rest.answer import Answer, collect
from gateway.rest.feed import Feed, while_connected
from gateway.rest.sse import EventStream, StreamWriter

# the service's own deadline comes first and can still be told
STREAM_GRACE_S = 10.0
# of an answer that takes longer to write than an event loop should be held up
MANY_LOGPROBS = 4096


class ReplyWriter(StreamWriter[Event], Protocol):
    """One request's."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Any thread may ask."""

    def unfinished(self, answer: Answer, error: ServiceError) -> Response:
        """Of an answer that `error` cut off. May raise the error."""


async def reply(
    request: Request, generation: Generation, writer: ReplyWriter, is_stream: bool, config: GatewayConfig
) -> Response:
    """Raises what the service raises, ClientGone too; once a stream has begun it says so itself."""
    if not is_stream:
        answer = await while_connected(request.receive, collect(generation.events))
        if answer.error is not None:
            return writer.unfinished(answer, answer.error)
        if sum(len(each.logprobs) + len(each.prompt_logprobs) for each in answer.choices) > MANY_LOGPROBS:
            # others' streams go on meanwhile
            return JSONResponse(await asyncio.to_thread(writer.whole, answer))
        return JSONResponse(writer.whole(answer))
    feed = Feed(generation.events)
    try:
        # an early failure still gets its own status; a long prefill gets its 200 and heartbeats
        await while_connected(request.receive, feed.wait(config.heartbeat_s))
        feed.check()
    except BaseException:
        await feed.close()
        raise
    return EventStream(feed, writer, config.heartbeat_s, config.request_timeout_s + STREAM_GRACE_S)
