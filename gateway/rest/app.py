"""The REST application."""

from __future__ import annotations

import re
import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware import Middleware
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from carrel.process.version import version
from gateway.config import GatewayConfig
from gateway.errors import ServiceError
from gateway.rest import attention_endpoints, endpoints, server_endpoints, session_endpoints
from gateway.rest.answers import ChatChunk, CompletionChunk
from gateway.rest.errors import on_http_error, on_invalid_parameters, on_service_error
from gateway.rest.feed import ClientGone
from gateway.rest.hints import HEADER as IGNORED_HEADER
from gateway.rest.hints import describe_hints
from gateway.rest.hosts import HostGuard, HostMiddleware
from gateway.rest.messages import endpoints as messages
from gateway.rest.messages import schemas as message_schemas
from gateway.rest.middleware import (
    RATE_HEADERS,
    AuthMiddleware,
    RequestIdMiddleware,
    RootPathMiddleware,
    UnexpectedErrorMiddleware,
)
from gateway.rest.responses import endpoints as responses
from gateway.rest.responses import schemas as response_schemas
from gateway.rest.server_endpoints import DOCS_FILE, DOCS_PATH, page_route
from gateway.service import ChatService
from gateway.turns import Turns

EVENTS = (ChatChunk, CompletionChunk, *message_schemas.EVENTS, *response_schemas.EVENTS)
# nginx's status for a client that is gone; only logs show it
CLIENT_CLOSED_REQUEST = 499
ROUTERS = (
    endpoints.answers,
    endpoints.router,
    messages.answers,
    messages.router,
    responses.answers,
    responses.router,
    session_endpoints.router,
    attention_endpoints.router,
    server_endpoints.open_router,
    server_endpoints.router,
)


def create_app(config: GatewayConfig, service: ChatService) -> FastAPI:
    """The API over one service."""
    app = FastAPI(
        title="Carrel",
        version=version(),
        openapi_url=None if config.disable_docs else "/openapi.json",
        # FastAPI's own pages load scripts from elsewhere, and send no key
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
        generate_unique_id_function=_operation_id,
        # spans and metrics are the gateway's own
        telemetry={"tracing": False, "metrics": False, "logs": False},
        middleware=_middleware(config, service),
        exception_handlers={
            ServiceError: on_service_error,
            RequestValidationError: on_invalid_parameters,
            HTTPException: on_http_error,
            ClientGone: _on_client_gone,
            ClientDisconnect: _on_client_gone,
        },
    )
    app.state.config, app.state.service = config, service
    app.state.turns, app.state.created = Turns(), int(time.time())
    for router in ROUTERS:
        app.include_router(router)
    if not config.disable_docs:
        app.router.routes += [page_route(), page_route(DOCS_PATH, DOCS_FILE)]
        # made now: no request waits for it
        _describe_events(app)
        if not config.strict_fields:
            describe_hints(app.openapi())
    return app


def _describe_events(app: FastAPI) -> None:
    """Add the events of streams to the document: FastAPI knows those of its own event streams only."""
    kinds: list[Any] = [(kind, "serialization") for kind in EVENTS]
    _, found = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    known = app.openapi()["components"]["schemas"]
    known.update({name: schema for name, schema in found["$defs"].items() if name not in known})


def _middleware(config: GatewayConfig, service: ChatService) -> list[Middleware]:
    """Return the middleware of every request; the first is met first."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        # clients add headers of their own, and the origin is trusted
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After", "X-Should-Retry", IGNORED_HEADER, *RATE_HEADERS],
    )
    # a page has no key, and reaches no Unix socket
    is_open = not config.has_keys and config.uds is None
    guard = Middleware(HostMiddleware, guard=HostGuard(config))
    keys: dict[str, Any] = {"keys": service.keys, "rate_limits": service.rate_limits}
    return [
        Middleware(RootPathMiddleware, root_path=config.root_path),
        Middleware(RequestIdMiddleware),
        Middleware(UnexpectedErrorMiddleware),
        *([guard] if is_open else ()),
        *([cors] if config.allowed_origins else ()),
        Middleware(AuthMiddleware, **keys, metrics=service.metrics),
    ]


def _operation_id(route: APIRoute) -> str:
    return f"{min(route.methods or ()).lower()}{re.sub(r'[^a-z]+', '_', route.path_format)}".rstrip("_")


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
