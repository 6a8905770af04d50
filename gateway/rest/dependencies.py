"""Dependencies of the endpoints: the application's parts, the caller, and the keys that the document shows."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import AfterValidator

from gateway.config import GatewayConfig
from gateway.rest.answers import ErrorAnswer
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
