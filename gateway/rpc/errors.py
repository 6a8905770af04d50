"""Every error as a gRPC status, or as an Error event once the stream has begun: the one table for gRPC."""

from __future__ import annotations

import grpc

from carrel.process.request_limits import CODE_KEY, PARAM_KEY
from gateway import errors
from gateway.errors import ServiceError
from gateway.rest.errors import STATUSES, TYPES
from gateway.v1 import chat_pb2

RETRY_KEY = "carrel-retry-after"
INTERNAL = "Internal error; the server's log has the cause."

CODES: dict[type[ServiceError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NoEmbeddings: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthorized: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.UnknownSession: grpc.StatusCode.NOT_FOUND,
    errors.UnknownAttention: grpc.StatusCode.NOT_FOUND,
    errors.UnknownResponse: grpc.StatusCode.NOT_FOUND,
    errors.TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooManyRequests: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.SlowBody: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RequestTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.VersionMismatch: grpc.StatusCode.UNAVAILABLE,
    errors.GenerationFailed: grpc.StatusCode.INTERNAL,
}


async def abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    """End the call with the error's status; what more there is of `carrel-param`, `carrel-code` and
    `carrel-retry-after`, in seconds, goes into the trailing metadata."""
    pairs = ((PARAM_KEY, error.param), (CODE_KEY, error.code), (RETRY_KEY, error.retry_after_s))
    metadata = tuple((key, str(value)) for key, value in pairs if value)
    await context.abort(CODES[type(error)], error.message, trailing_metadata=metadata)


def error_event(error: ServiceError) -> chat_pb2.Error:
    """The same type and number as in the REST API."""
    status = STATUSES[type(error)]
    return chat_pb2.Error(message=error.message, type=TYPES[status], param=error.param or "", code=status)
