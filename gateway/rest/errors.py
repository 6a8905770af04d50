"""Every error as `{"error": {"message", "type", "param", "code"}}`, and the one table of statuses for REST."""

from __future__ import annotations

from difflib import get_close_matches

from fastapi import Request
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.routing import Match

from gateway import errors
from gateway.errors import ServiceError
from gateway.rest.answers import ErrorAnswer, ErrorTold
from gateway.rest.schemas import Body
from gateway.rest.written import BodyResponse

STATUSES: dict[type[ServiceError], int] = {
    errors.InvalidRequest: 400,
    errors.NoEmbeddings: 400,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.UnknownModel: 404,
    errors.UnknownSession: 404,
    errors.UnknownAttention: 404,
    errors.UnknownResponse: 404,
    errors.SlowBody: 408,
    errors.TooLarge: 413,
    errors.TooManyRequests: 429,
    errors.GenerationFailed: 500,
    errors.Overloaded: 503,
    errors.ShuttingDown: 503,
    errors.WorkerUnavailable: 503,
    errors.StoreUnavailable: 503,
    errors.VersionMismatch: 503,
    errors.RequestTimeout: 504,
}

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


def error_body(error: ServiceError) -> ErrorAnswer:
    """The JSON of an error, in a reply and in a stream alike."""
    return _body(STATUSES[type(error)], error.message, error.param, error.code)


def error_response(error: ServiceError, answer: Body | None = None) -> BodyResponse:
    """answer: what else the body has, with a field `error`."""
    status = STATUSES[type(error)]
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if status in NOT_RETRYABLE:
        headers["x-should-retry"] = "false"
    body = error_body(error)
    return BodyResponse(body if answer is None else answer.model_copy(update=dict(body)), status, headers)


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


def internal_error_response() -> BodyResponse:
    """A bug: the log has the cause, the client only the request's id to quote."""
    return BodyResponse(internal_error_body(), 500, {"x-should-retry": "false"})


def internal_error_body() -> ErrorAnswer:
    return _body(500, "Internal error; the server's log has the cause.", None, "internal_error")


def _body(status: int, message: str, param: str | None, code: str | None) -> ErrorAnswer:
    kind = TYPES.get(status, "APIError")
    told = ErrorTold(message=message, type=kind, param=param, code=code or status)
    return ErrorAnswer(error=told)
