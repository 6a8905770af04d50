"""The REST application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.config import GatewayConfig
from gateway.errors import ServiceError
from gateway.rest.attention_endpoints import AttentionEndpoints
from gateway.rest.documentation import Operation, documentation
from gateway.rest.endpoints import Endpoints
from gateway.rest.errors import on_http_error
from gateway.rest.feed import ClientGone
from gateway.rest.hosts import HostGuard, HostMiddleware
from gateway.rest.messages.endpoints import MessagesEndpoints
from gateway.rest.middleware import (
    RATE_HEADERS,
    AuthMiddleware,
    RequestIdMiddleware,
    RootPathMiddleware,
    UnexpectedErrorMiddleware,
)
from gateway.rest.page import page_route
from gateway.rest.refusals import on_service_error
from gateway.rest.responses.endpoints import ResponsesEndpoints
from gateway.rest.server_endpoints import ServerEndpoints
from gateway.rest.session_endpoints import SessionEndpoints
from gateway.service import ChatService

# nginx's status for a client that is gone; only logs show it
CLIENT_CLOSED_REQUEST = 499


def operations_of(config: GatewayConfig, service: ChatService) -> tuple[Operation, ...]:
    """All routes of the API."""
    return (
        *Endpoints(config, service).operations(),
        *MessagesEndpoints(config, service).operations(),
        *ResponsesEndpoints(config, service).operations(),
        *SessionEndpoints(service).operations(),
        *AttentionEndpoints(config, service).operations(),
        *ServerEndpoints(config, service).operations(),
    )


def create_app(config: GatewayConfig, service: ChatService) -> Starlette:
    """The OpenAI-compatible API over one service."""
    operations = operations_of(config, service)
    models = next(each.handler for each in operations if each.path == "/v1/models")
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        # clients add headers of their own, and the origin is trusted
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After", "X-Should-Retry", *RATE_HEADERS],
    )
    # a page has no key, and reaches no Unix socket
    is_open = not config.has_keys and config.uds is None
    guard = Middleware(HostMiddleware, guard=HostGuard(config))
    app = Starlette(
        routes=[
            # servers that redirect lead a client from here to the list
            Route("/v1/models/", models),
            *(each.route for each in operations),
            *(() if config.disable_docs else (page_route(), *documentation(operations, config.root_path))),
        ],
        # the first is met first
        middleware=[
            Middleware(RootPathMiddleware, root_path=config.root_path),
            Middleware(RequestIdMiddleware),
            Middleware(UnexpectedErrorMiddleware),
            *([guard] if is_open else ()),
            *([cors] if config.allowed_origins else ()),
            Middleware(
                AuthMiddleware, keys=service.keys, rate_limits=service.rate_limits, metrics=service.metrics
            ),
        ],
        exception_handlers={
            ServiceError: on_service_error,
            HTTPException: on_http_error,
            ClientGone: _on_client_gone,
            ClientDisconnect: _on_client_gone,
        },
    )
    app.router.redirect_slashes = False
    return app


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
