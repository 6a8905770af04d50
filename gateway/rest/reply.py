"""The way of a generation to its client, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from typing import Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.config import GatewayConfig
from gateway.errors import ServiceError
from gateway.exchange import Generation
from gateway.heavy_work import HeavyWork
from gateway.rest.answer import MANY_VALUES, VALUE_CHARS, Answer, ReplyWriter, collect, num_values
from gateway.rest.errors import BodyResponse
from gateway.rest.feed import ClientGone, Feed, while_connected
from gateway.rest.schemas import Body, Tagged

PING = b": ping\n\n"

log = logging.getLogger(__name__)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class StreamWriter(Protocol[T_contra]):
    """Write a request's events in the format of some API's stream."""

    # after the last frame, however it ended
    end: bytes

    async def frames(self, event: T_contra) -> bytes:
        """None, one or several."""

    def failed(self, error: ServiceError | None) -> bytes:
        """Return the frame for an error; None stands for a bug."""


class EventStream(Response, Generic[T]):
    """Sends a feed and closes it: at its end, when the client goes, and after `timeout_s` if it is not read."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed[T], writer: StreamWriter[T], heartbeat_s: float, timeout_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._feed = feed
        self._writer = writer
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await while_connected(receive, self._send_all(send))
        except ClientGone:
            log.info("a client left its stream")
        except TimeoutError:
            log.warning("a client did not read its stream within %g s", self._timeout_s)
        finally:
            await self._feed.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send_events(send)
        except ServiceError as error:
            await _write(send, self._writer.failed(error))
        except Exception:
            log.exception("a stream failed")
            await _write(send, self._writer.failed(None))
        await _write(send, self._writer.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        while True:
            while not await self._feed.wait(self._heartbeat_s):
                await _write(send, PING)
            event = await self._feed.take()
            if event is None:
                return
            if body := await self._writer.frames(event):
                await _write(send, body)


def frame(body: Body) -> bytes:
    """Return a frame of data without an event name."""
    return b"data: %b\n\n" % body.written()


def named_frame(event: Tagged) -> bytes:
    """Return a frame under the name that is the event's `type`."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), event.written())


async def _write(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


# the service's own deadline comes first and can still be told
STREAM_GRACE_S = 10.0


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
