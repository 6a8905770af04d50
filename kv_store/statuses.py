"""The one table from the store's errors to gRPC statuses."""

from __future__ import annotations

import logging
from typing import NoReturn

import grpc

from kv_store.client.errors import InvalidStoreRequest
from kv_store.errors import (
    FailedPrecondition,
    InvalidArgument,
    KVStoreError,
    NotFound,
    OutOfSpace,
    Overloaded,
    VersionMismatch,
)

_log = logging.getLogger(__name__)

_STATUSES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (InvalidStoreRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (VersionMismatch, grpc.StatusCode.UNIMPLEMENTED),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION),
    (OutOfSpace, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
)


def abort(context: grpc.ServicerContext, method: str, error: Exception) -> NoReturn:
    """End the call with the error's status; what was not raised on purpose goes to the log."""
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            context.abort(status, str(error))
    if isinstance(error, KVStoreError):
        context.abort(grpc.StatusCode.INTERNAL, str(error))
    # The caller learns nothing of our insides; the operator finds them in the log.
    _log.error("%s failed", method, exc_info=error)
    context.abort(grpc.StatusCode.INTERNAL, f"{method} failed in the store; its log says why")
    raise error
