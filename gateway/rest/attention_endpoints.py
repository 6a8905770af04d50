"""`/v1/attention`: what a running request attends, and where that lives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest, ServiceError
from gateway.rest.documentation import Operation
from gateway.rest.errors import error_body, internal_error_body
from gateway.rest.feed import Feed
from gateway.rest.sse import EventStream, frame
from gateway.service import ChatService


class AttentionEndpoints:
    """The handler, as a method over one service."""

    def __init__(self, config: GatewayConfig, service: ChatService) -> None:
        self._config = config
        self._service = service

    def operations(self) -> tuple[Operation, ...]:
        return (Operation("GET", "/v1/attention/{request_id}", self.watch),)

    async def watch(self, request: Request) -> Response:
        """What a request that asked with `carrel.attention` attends, by its id: server-sent events until it ends, or
        with `stream=false` the newest one; of the KV head `head` and the layer `layer`, or the mean over them."""
        caller, views = request.state.caller, self._service.attention
        view = views.get(caller, str(request.path_params["request_id"]))
        layer, head = _number(request, "layer"), _number(request, "head")
        work = self._service.work.of(caller)

        async def pictures() -> AsyncGenerator[bytes, None]:
            with views.readers.held(caller):
                async with aclosing(view.sights()) as sights:
                    async for sight in sights:
                        yield await view.pictures.draw(sight, layer, head, work)

        match request.query_params.get("stream", "true"):
            case "true":
                feed = Feed(pictures())
                # it begins: a refusal has its own status
                await feed.wait(0)
                feed.check()
                timeout_s = self._config.request_timeout_s
                return EventStream(feed, Frames(), self._config.heartbeat_s, timeout_s)
            case "false":
                if view.latest is None:
                    return JSONResponse({"object": "attention", "id": view.request_id})
                newest = await view.pictures.draw(view.latest, layer, head, work)
                return Response(newest, media_type=JSONResponse.media_type)
        raise InvalidRequest("stream is true or false.", "stream")


class Frames:
    """Pictures as a stream."""

    end = b"data: [DONE]\n\n"

    async def frames(self, event: bytes) -> bytes:
        return b"data: %b\n\n" % event

    def failed(self, error: ServiceError | None) -> bytes:
        """What is said of an error, None for a bug."""
        return frame(internal_error_body() if error is None else error_body(error))


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise InvalidRequest(f"{name} is a whole number from 0 up.", name)
    return int(text)
