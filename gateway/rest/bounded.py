"""Routes with bounded bodies, read within a limit and a time, in turns of the callers; and what their endpoints get.

FastAPI alone would read a body of any size and decode and check it in the event loop, with one error for each wrong
value. Here a body is a checked record before FastAPI asks for it; FastAPI hands it to the endpoint.
"""

from __future__ import annotations

import asyncio
import logging
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine, Set
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import AfterValidator, BaseModel, ValidationError

from carrel.process.request_context import rename_request
from gateway.body_limits import BodyLimit, BodyLimits
from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest, SlowBody
from gateway.json_limits import check_json, check_others, read_json
from gateway.rest.answers import ErrorAnswer
from gateway.rest.errors import invalid_body
from gateway.rest.hints import take_hints
from gateway.rest.schemas import Body
from gateway.service import ChatService
from gateway.sessions import check_session_id
from gateway.turns import Turns

# The middleware asks for the key, before the body and for unknown routes too; here it is for the document.
KEY: list[Any] = [
    Depends(HTTPBearer(scheme_name="bearer", auto_error=False)),
    Depends(APIKeyHeader(name="x-api-key", scheme_name="x-api-key", auto_error=False)),
]
ERRORS: dict[int | str, dict[str, Any]] = {
    kind: {"model": ErrorAnswer, "description": "why not"} for kind in ("4XX", "5XX")
}


def streamed(*events: type[Body]) -> dict[int | str, dict[str, Any]]:
    """Return the document's part for a route that may stream these events, which `app` describes."""
    kinds = [{"$ref": f"#/components/schemas/{event.__name__}"} for event in events]
    content = {"text/event-stream": {"schema": {"anyOf": kinds}}}
    return {200: {"description": "the answer", "content": content}}


async def _config(request: Request) -> GatewayConfig:
    config: GatewayConfig = request.app.state.config
    return config


async def _service(request: Request) -> ChatService:
    service: ChatService = request.app.state.service
    return service


async def _turns(request: Request) -> Turns:
    turns: Turns = request.app.state.turns
    return turns


async def _caller(request: Request) -> bytes:
    caller: bytes = request.state.caller
    return caller


async def _request_id(request: Request) -> str:
    return str(request.state.request_id)


Config = Annotated[GatewayConfig, Depends(_config)]
Service = Annotated[ChatService, Depends(_service)]
KeptTurns = Annotated[Turns, Depends(_turns)]
Caller = Annotated[bytes, Depends(_caller)]
RequestId = Annotated[str, Depends(_request_id)]
SessionId = Annotated[str, AfterValidator(check_session_id)]


# a larger body is decoded and checked in a thread
LARGE_BYTES = 2**20
MAX_ENCODING_CHARS = 40

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[M]):
    """A checked body, and the names of the hints that were taken out of it."""

    record: M
    ignored: tuple[str, ...] = ()


class BoundedRequest(Request):
    """A request whose JSON body was loaded: FastAPI gets the record, which it need not check again."""

    _record: BaseModel

    async def load(self, kind: type[M], limits: BodyLimits, template_names: Set[str] | None = None) -> M:
        """Read, decode and check the body; the names of its hints are in the state, for the answer's header.

        template_names: see `read_record`. Raises TooLarge or WorkerUnavailable before decoding, SlowBody, and
        InvalidRequest."""
        self._check_headers()
        limit = await limits.now()
        async with limits.room.taken(self._owner(), self._max_bytes(limit)):
            raw = await self._read(limit, limits.timeout_s)
            caller = self.state.caller
            how = (raw, kind, limit.max_token_ids, template_names)
            if len(raw) > LARGE_BYTES:
                loaded = await limits.work.run(caller, len(raw), read_record, *how)
            else:
                async with limits.turns.turn(caller, len(raw)):
                    try:
                        loaded = read_record(*how)
                    finally:
                        # what becomes of it, and the next body, have turns of their own
                        await asyncio.sleep(0)
        if loaded.ignored:
            self.state.ignored = ", ".join(loaded.ignored)
            log.debug("ignored hints: %s", self.state.ignored)
        self._record = loaded.record
        return loaded.record

    async def body(self) -> bytes:
        """Nothing of what was read, which is not kept; FastAPI asks whether there is any."""
        return b"loaded"

    async def json(self) -> Any:
        """The record."""
        return self._record

    def _check_headers(self) -> None:
        content_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            # a form could be sent by any web page
            raise InvalidRequest("Send the body as JSON with 'Content-Type: application/json'.")
        encoding = self.headers.get("content-encoding", "").strip()
        if encoding.lower() not in ("", "identity"):
            raise InvalidRequest(
                f"A body with 'Content-Encoding: {encoding[:MAX_ENCODING_CHARS]}' is not unpacked: send it as it is."
            )

    def _owner(self) -> bytes:
        """The caller, or the client's address where the API is open."""
        caller: bytes = self.state.caller
        return caller or (self.client.host.encode() if self.client else b"")

    def _max_bytes(self, limit: BodyLimit) -> int:
        """The declared length; of a body in chunks the most that is read. Raises what `excess` is."""
        length = self.headers.get("content-length", "")
        if not length.isascii() or not length.isdigit():
            return limit.max_bytes
        if len(length) > 18 or int(length) > limit.max_bytes:
            raise limit.excess()
        return int(length)

    async def _read(self, limit: BodyLimit, timeout_s: float) -> bytes:
        raw = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in self.stream():
                    raw += chunk
                    if len(raw) > limit.max_bytes:
                        raise limit.excess()
        except TimeoutError as exc:
            raise SlowBody(timeout_s) from exc
        # some editors and shells write it first in a file
        return bytes(raw.removeprefix(BOM_UTF8))


class BoundedRoute(APIRoute):
    """A route whose body is loaded within the service's limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, on a loaded request where the route has a body."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation

        async def bounded(request: Request) -> Response:
            loaded = BoundedRequest(request.scope, request.receive)
            await self.load(loaded, kind, request.app.state.service)
            return await handle(loaded)

        return bounded

    async def load(self, request: BoundedRequest, kind: type[Any], service: ChatService) -> None:
        """Load the body. Raises ServiceErrors."""
        await request.load(kind, service.bodies, service.template_names)


class AnswerRoute(BoundedRoute):
    """A route that asks for an answer. Refused bodies are counted; the answer, and what is logged, have the request id
    of the body, unless a header had one."""

    async def load(self, request: BoundedRequest, kind: type[Any], service: ChatService) -> None:
        """Load the body, which is an `AnswerBody`. Raises ServiceErrors."""
        with service.metrics.counting_refusals():
            body = await request.load(kind, service.bodies, service.template_names)
        state = request.state
        if body.request_id is not None and request.headers.get("x-request-id") != state.request_id:
            state.request_id = body.request_id
            rename_request(body.request_id)


class BoundedRouter(APIRouter):
    """A router of bounded routes."""

    def __init__(self, route_class: type[BoundedRoute] = BoundedRoute, **options: Any) -> None:
        super().__init__(route_class=route_class, **options)

    def get(self, path: str, **options: Any) -> Any:
        """As FastAPI's `get`, with HEAD, which is not in the document."""
        get, head = super().get(path, **options), super().head(path, **options | {"include_in_schema": False})
        return lambda endpoint: get(head(endpoint))


def read_record(
    raw: bytes, kind: type[M], max_token_ids: int, template_names: Set[str] | None = None
) -> Loaded[M]:
    """Decode and check a body.

    template_names: the variables that the model's chat template reads; None: no hint is taken. Raises TooLarge and
    InvalidRequest.
    """
    num_values = check_json(raw, max_token_ids)
    try:
        decoded = read_json(raw)
        check_others(num_values, decoded)
        ignored = () if template_names is None else take_hints(decoded, kind, template_names)
        return Loaded(kind.model_validate(decoded), ignored)
    except ValidationError as exc:
        raise invalid_body(exc) from exc
    except ValueError as exc:
        raise InvalidRequest(f"Invalid JSON: {exc}") from exc
