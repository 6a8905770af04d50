"""Every error as a gRPC status, or as an Error event once the stream has begun: the one table for gRPC."""

from __future__ import annotations

import grpc

from gateway.errors import (
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    ServiceError,
    ShuttingDown,
    SlowBody,
    TooLarge,
    Unauthorized,
    UnknownModel,
    VersionMismatch,
    WorkerUnavailable,
)
from gateway.rest.errors import STATUSES, TYPES
from gateway.v1 import chat_pb2

PARAM_KEY = "carrel-param"
CODE_KEY = "carrel-code"
INTERNAL = "Internal error; the server's log has the cause."

CODES: dict[type[ServiceError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthorized: grpc.StatusCode.UNAUTHENTICATED,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowBody: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    WorkerUnavailable: grpc.StatusCode.UNAVAILABLE,
    VersionMismatch: grpc.StatusCode.UNAVAILABLE,
    GenerationFailed: grpc.StatusCode.INTERNAL,
}


async def abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    """End the call with the error's status; `carrel-param` and `carrel-code` go into the trailing metadata."""
    pairs = ((PARAM_KEY, error.param), (CODE_KEY, error.code))
    metadata = tuple((key, value) for key, value in pairs if value)
    await context.abort(CODES[type(error)], error.message, trailing_metadata=metadata)


def error_event(error: ServiceError) -> chat_pb2.Error:
    """The same type and number as in the REST API."""
    status = STATUSES[type(error)]
    return chat_pb2.Error(message=error.message, type=TYPES[status], param=error.param or "", code=status)
