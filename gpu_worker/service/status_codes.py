"""The one table from worker errors to gRPC statuses."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from gpu_worker.errors import (
    CapacityError,
    EngineStopped,
    RequestError,
    SlowConsumer,
    StoreUnavailable,
    VersionMismatch,
    WorkerError,
)

PARAM_KEY = "carrel-param"
CODE_KEY = "carrel-code"

_CODES: dict[type[WorkerError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
    EngineStopped: grpc.StatusCode.UNAVAILABLE,
    SlowConsumer: grpc.StatusCode.ABORTED,
    WorkerError: grpc.StatusCode.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class Status:
    """What a caller sees of an error; `metadata` is trailing."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...] = ()


def status_of(error: Exception) -> Status:
    """The status for an error. Only a WorkerError's text reaches the caller."""
    metadata: tuple[tuple[str, str], ...] = ()
    match error:
        case RequestError(param=param, code=code):
            metadata = ((PARAM_KEY, param), *([(CODE_KEY, code)] if code else []))
    for kind in type(error).__mro__:
        if kind in _CODES:
            return Status(_CODES[kind], str(error), metadata)
    return Status(grpc.StatusCode.INTERNAL, "Internal error; the worker's log has the cause.")
