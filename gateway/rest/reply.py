"""The way of a generation to its client, whole or as a stream, in the words of whichever API it was asked by."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from gateway.config import GatewayConfig
from gateway.errors import ServiceError
from gateway.exchange import Event, Generation
from gateway.heavy_work import HeavyWork
from gateway.rest.answer import MANY_VALUES, VALUE_CHARS, Answer, collect, num_values
from gateway.rest.errors import BodyResponse
from gateway.rest.feed import Feed, while_connected
from gateway.rest.schemas import Body
from gateway.rest.sse import EventStream, StreamWriter

# the service's own deadline comes first and can still be told
STREAM_GRACE_S = 10.0


class ReplyWriter(StreamWriter[Event], Protocol):
    """One request's."""

    def whole(self, answer: Answer) -> Body:
        """Any thread may ask."""

    def unfinished(self, answer: Answer, error: ServiceError) -> Response:
        """Return the response for an answer that `error` cut off, in any thread. May raise the error."""


async def reply(request: Request, generation: Generation, writer: ReplyWriter, is_stream: bool) -> Response:
    """Raises what the service raises, ClientGone too; once a stream has begun it says so itself."""
    config: GatewayConfig = request.app.state.config
    work: HeavyWork = request.app.state.service.work
    if not is_stream:
        answer = await while_connected(request.receive, collect(generation.events))
        if (count := sum(map(num_values, answer.choices))) > MANY_VALUES:
            # others' streams go on meanwhile
            return await work.answer(request.state.caller, count * VALUE_CHARS, _whole, writer, answer)
        return _whole(writer, answer)
    feed = Feed(generation.events)
    try:
        # an early failure still gets its own status; a long prefill gets its 200 and heartbeats
        await while_connected(request.receive, feed.wait(config.heartbeat_s))
        feed.check()
    except BaseException:
        await feed.close()
        raise
    return EventStream(feed, writer, config.heartbeat_s, config.request_timeout_s + STREAM_GRACE_S)


def _whole(writer: ReplyWriter, answer: Answer) -> Response:
    if answer.error is not None:
        return writer.unfinished(answer, answer.error)
    return BodyResponse(writer.whole(answer))
