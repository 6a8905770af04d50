"""`/v1/attention`: what a running request attends, and where that lives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import Query, Response
from fastapi.responses import JSONResponse

from gateway.errors import ServiceError
from gateway.rest.answers import AttentionAnswer, ErrorAnswer
from gateway.rest.bounded import ERRORS, KEY, BoundedRouter, Caller, Config, Service, streamed
from gateway.rest.errors import BodyResponse, error_body
from gateway.rest.feed import Feed
from gateway.rest.reply import EventStream, frame

Number = Annotated[int | None, Query(ge=0, le=99_999)]

router = BoundedRouter(dependencies=KEY, responses=ERRORS)


@router.get(
    "/v1/attention/{request_id}",
    response_model=AttentionAnswer,
    responses=streamed(AttentionAnswer, ErrorAnswer),
)
async def watch(
    request_id: str,
    caller: Caller,
    service: Service,
    config: Config,
    stream: Literal["true", "false"] = "true",
    layer: Number = None,
    head: Number = None,
) -> Response:
    """Show what a request that asked with `carrel.attention` attends, by its id: server-sent events until it ends, or
    with `stream=false` the newest one; of the KV head `head` and the layer `layer`, or the mean over them."""
    views, work = service.attention, service.work.of(caller)
    view = views.get(caller, request_id)

    async def pictures() -> AsyncGenerator[bytes, None]:
        with views.readers.held(caller):
            async with aclosing(view.sights()) as sights:
                async for sight in sights:
                    yield await view.pictures.draw(sight, layer, head, work)

    if stream == "true":
        feed = Feed(pictures())
        # it begins: a refusal has its own status
        await feed.wait(0)
        feed.check()
        return EventStream(feed, Frames(), config.heartbeat_s, config.request_timeout_s)
    if view.latest is None:
        return BodyResponse(AttentionAnswer(object="attention", id=view.request_id))
    newest = await view.pictures.draw(view.latest, layer, head, work)
    return Response(newest, media_type=JSONResponse.media_type)


class Frames:
    """Pictures as a stream."""

    end = b"data: [DONE]\n\n"

    async def frames(self, event: bytes) -> bytes:
        return b"data: %b\n\n" % event

    def failed(self, error: ServiceError | None) -> bytes:
        """Return the frame for an error; None stands for a bug."""
        return frame(error_body(error))
