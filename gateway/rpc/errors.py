"""Every error as a gRPC status, or as an Error event once the stream has begun: the one table for gRPC."""

from __future__ import annotations

import grpc

from carrel.process.request_limits import CODE_KEY, PARAM_KEY
from gateway.errors import Overloaded, ServiceError
from gateway.rest.errors import TYPES
from gateway.v1 import chat_pb2

RETRY_KEY = "carrel-retry-after"

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


async def abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    """End the call with the error's status; what more there is of `carrel-param`, `carrel-code` and
    `carrel-retry-after`, in seconds, goes into the trailing metadata."""
    pairs = ((PARAM_KEY, error.param), (CODE_KEY, error.code), (RETRY_KEY, error.retry_after_s))
    metadata = tuple((key, str(value)) for key, value in pairs if value)
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if error.code == Overloaded.code else CODES[error.status]
    await context.abort(code, error.message, trailing_metadata=metadata)


def error_event(error: ServiceError) -> chat_pb2.Error:
    """The same type and number as in the REST API."""
    kind = TYPES[error.status]
    return chat_pb2.Error(message=error.message, type=kind, param=error.param or "", code=error.status)
