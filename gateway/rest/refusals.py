"""Errors in the words of the API that a request's path belongs to."""

from __future__ import annotations

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import Scope

from gateway.errors import ServiceError
from gateway.rest.errors import error_response, internal_error_response
from gateway.rest.invalid import invalid_fields
from gateway.rest.messages.errors import message_error_response, message_internal_error_response

MESSAGES = "/v1/messages"


def refusal(scope: Scope, error: ServiceError | None) -> JSONResponse:
    """The answer that reports this error; None stands for a bug."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return message_internal_error_response() if error is None else message_error_response(error)
    return internal_error_response() if error is None else error_response(error)


async def on_service_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServiceError)
    return refusal(request.scope, error)


async def on_invalid_parameters(request: Request, error: Exception) -> JSONResponse:
    """The answer to wrong values in a path or a query; wrong bodies are refused before."""
    assert isinstance(error, RequestValidationError)
    errors = [{**each, "loc": each["loc"][1:]} for each in error.errors()]
    return refusal(request.scope, invalid_fields(errors))
