"""The REST application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from carrel.process.version import version
from gateway.auth import KeyRing
from gateway.config import GatewayConfig
from gateway.errors import ServiceError
from gateway.rest.endpoints import create_router
from gateway.rest.errors import on_http_error, on_service_error
from gateway.rest.feed import ClientGone
from gateway.rest.middleware import AuthMiddleware, RequestIdMiddleware, UnexpectedErrorMiddleware
from gateway.rest.openapi import add_schemas
from gateway.rest.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.service import ChatService

# nginx's status for a client that is gone; only logs show it
CLIENT_CLOSED_REQUEST = 499


def create_app(config: GatewayConfig, service: ChatService) -> FastAPI:
    """The OpenAI-compatible API over one service."""
    app = FastAPI(
        title="Carrel",
        version=version(),
        docs_url="/docs" if config.has_docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if config.has_docs else None,
        redirect_slashes=False,
    )
    app.include_router(create_router(config, service))
    add_schemas(app, (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody))
    app.add_exception_handler(ServiceError, on_service_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    # the last one added is the first one met
    app.add_middleware(AuthMiddleware, keys=KeyRing(config.api_keys))
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(UnexpectedErrorMiddleware)
    app.add_middleware(RequestIdMiddleware)
    return app


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
