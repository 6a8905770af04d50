"""Errors as Anthropic's clients read them; statuses and headers are those of every route."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from gateway.errors import ServiceError
from gateway.rest.errors import STATUSES, error_response, internal_error_response

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
INTERNAL: dict[str, Any] = {
    "type": "error",
    "error": {"type": "api_error", "message": "Internal error; the server's log has the cause."},
}


def message_error(error: ServiceError) -> dict[str, Any]:
    """With our `param` and `code` beside Anthropic's own."""
    kind = KINDS[STATUSES[type(error)]]
    told = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": told}


def message_error_response(error: ServiceError) -> JSONResponse:
    response = error_response(error)
    return JSONResponse(message_error(error), response.status_code, _own_headers(response))


def message_internal_error_response() -> JSONResponse:
    response = internal_error_response()
    return JSONResponse(INTERNAL, response.status_code, _own_headers(response))


def _own_headers(response: JSONResponse) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if not name.startswith("content-")}
