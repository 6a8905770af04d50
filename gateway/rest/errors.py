"""Errors in the words of the API that a request's path belongs to: OpenAI's, or Anthropic's below `/v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from string import ascii_uppercase
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import iter_route_contexts
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from gateway.errors import InvalidRequest, ServiceError
from gateway.rest.answers import ErrorAnswer, ErrorTold
from gateway.rest.fields import NOT_DONE
from gateway.rest.messages.schemas import MessageErrorAnswer, MessageErrorTold
from gateway.rest.schemas import Body

MAX_ERRORS = 10
MAX_ERROR_CHARS = 200
# longer values are not shown
MAX_VALUE_CHARS = 40
# instead of pydantic's own words, which are Python's
JSON_WORDS = {
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "list_type": "Input should be a valid array",
}
# pydantic names the branch of a union in an error's place, a class by its name; a client knows only its own fields
_BRANCHES = (
    "str",
    "int",
    "float",
    "list[",
    "dict[",
    "bool",
    "literal[",
    "constrained-",
    "function-wrap[",
    "function-after[",
    "[key]",
    *ascii_uppercase,
)


def invalid_body(error: ValidationError) -> InvalidRequest:
    """The error of a body. Lists and objects fail at their first wrong entry, so that there are few."""
    return invalid_fields(error.errors(include_url=False, include_context=False))


def invalid_fields(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The error of these pydantic errors. The client may have sent megabytes, so only short values are shown."""
    lines = list(dict.fromkeys(_line(error) for error in errors))
    more = f"; and {len(lines) - MAX_ERRORS} more" if len(lines) > MAX_ERRORS else ""
    return InvalidRequest("; ".join(lines[:MAX_ERRORS]) + more, _param(errors[0]) or None)


def _line(error: Mapping[str, Any]) -> str:
    param = _param(error)
    text = JSON_WORDS.get(error["type"], error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            text = "there is no such field"
        case kind if kind not in ("missing", NOT_DONE):
            text += _shown(error["input"])
    return (f"{param}: {text}" if param else text)[:MAX_ERROR_CHARS]


def _shown(value: Any) -> str:
    """The value that was given, if it is a number, a truth value or a short text."""
    match value:
        case str() if len(value) > MAX_VALUE_CHARS:
            return ""
        case int() if abs(value) > 10**MAX_VALUE_CHARS:
            return ""
        case bool() | int() | float() | str():
            return f", not {json.dumps(value)}"
    return ""


def _param(error: Mapping[str, Any]) -> str:
    places = [str(place) for place in error["loc"]]
    kept = places[:1] + [place for place in places[1:] if not place.startswith(_BRANCHES)]
    return ".".join(kept)[:MAX_ERROR_CHARS]


TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
# another try would fail the same way, or would cost as much again
NOT_RETRYABLE = (500, 504)
MAX_PATH_CHARS = 64
INTERNAL = "Internal error; the server's log has the cause."
MESSAGES = "/v1/messages"
# Anthropic's types of errors
MESSAGE_TYPES = {
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


class BodyResponse(JSONResponse):
    """A response that is a body; of a long one it belongs in a thread."""

    def render(self, content: Body) -> bytes:
        """The body's JSON."""
        return content.written()


def error_body(error: ServiceError | None) -> ErrorAnswer:
    """The JSON of an error, in a reply and in a stream alike; None stands for a bug."""
    if error is None:
        return _body(500, INTERNAL, None, "internal_error")
    return _body(error.status, error.message, error.param, error.code)


def message_error(error: ServiceError | None) -> MessageErrorAnswer:
    """As `error_body`, in Anthropic's words."""
    if error is None:
        return MessageErrorAnswer(error=MessageErrorTold(type="api_error", message=INTERNAL))
    kind = MESSAGE_TYPES[error.status]
    told = MessageErrorTold(type=kind, message=error.message, param=error.param, code=error.code)
    return MessageErrorAnswer(error=told)


def error_response(error: ServiceError | None, body: Body | None = None) -> BodyResponse:
    """body: None: what `error_body` says."""
    status = 500 if error is None else error.status
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error is not None and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if status in NOT_RETRYABLE:
        headers["x-should-retry"] = "false"
    return BodyResponse(error_body(error) if body is None else body, status, headers)


def refusal(scope: Scope, error: ServiceError | None) -> BodyResponse:
    """The answer that reports this error; None stands for a bug, whose cause only the log has."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    is_message = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return error_response(error, message_error(error) if is_message else None)


async def on_service_error(request: Request, error: Exception) -> BodyResponse:
    assert isinstance(error, ServiceError)
    return refusal(request.scope, error)


async def on_invalid_parameters(request: Request, error: Exception) -> BodyResponse:
    """The answer to wrong values in a path or a query; wrong bodies are refused before."""
    assert isinstance(error, RequestValidationError)
    wrong = [{**each, "loc": each["loc"][1:]} for each in error.errors()]
    return refusal(request.scope, invalid_fields(wrong))


async def on_http_error(request: Request, error: Exception) -> BodyResponse:
    """Routes that do not exist, and methods that they do not have."""
    assert isinstance(error, HTTPException)
    path, headers = request.scope["path"][:MAX_PATH_CHARS], error.headers
    match error.status_code:
        case 404:
            known = [str(route.path) for route in iter_route_contexts(request.app.routes)]
            # as where /v1 was left out, or a letter
            near = get_close_matches(path, known, 1, 0.75)
            text = f"There is no route {path!r}" + (f"; did you mean {near[0]}?" if near else ".")
        case 405:
            routes = iter_route_contexts(request.app.routes)
            matching = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
            allowed = ", ".join(sorted({method for route in matching for method in route.methods or ()}))
            headers = {"Allow": allowed}
            text = f"{path} does not take {request.method[:16]}: use {allowed}."
        case _:
            text = "The request cannot be served."
    return BodyResponse(_body(error.status_code, text, None, None), error.status_code, headers)


def _body(status: int, message: str, param: str | None, code: str | None) -> ErrorAnswer:
    kind = TYPES.get(status, "APIError")
    told = ErrorTold(message=message, type=kind, param=param, code=code or status)
    return ErrorAnswer(error=told)
