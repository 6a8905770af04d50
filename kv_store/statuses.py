"""Calls end with a status: the one seam where the store's errors become gRPC's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import grpc

from kv_store.client.errors import StoreFull
from kv_store.client.rpc import ERRORS, MISSING_BYTES_KEY
from kv_store.errors import TrainingFailed
from kv_store.v1 import kv_store_pb2 as pb

S = TypeVar("S")

_log = logging.getLogger(__name__)

_STATUSES: dict[type[Exception], grpc.StatusCode] = {
    **{kind: status for status, kind in ERRORS.items()},
    TrainingFailed: grpc.StatusCode.INTERNAL,
}


def _abort(context: grpc.ServicerContext, method: str, error: Exception) -> NoReturn:
    """End the call with the error's status; of an unexpected error the caller learns nothing, and the log all."""
    match error:
        case StoreFull(missing_bytes=missing) if missing:
            context.set_trailing_metadata(((MISSING_BYTES_KEY, str(missing)),))
    if (status := _STATUSES.get(type(error))) is not None:
        context.abort(status, str(error))
    _log.error("%s failed", method, exc_info=error)
    context.abort(grpc.StatusCode.INTERNAL, f"{method} failed in the store; its log says why")
    raise error


def unary(method: Callable[[S, Any], Any]) -> Callable[[S, Any, grpc.ServicerContext], Any]:
    @functools.wraps(method)
    def call(servicer: S, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(servicer, request)
        except Exception as exc:
            _abort(context, method.__name__, exc)

    return call


def streaming(
    method: Callable[[S, Any], Iterator[bytes]],
) -> Callable[[S, Any, grpc.ServicerContext], Iterator[pb.RowsChunk]]:
    @functools.wraps(method)
    def call(servicer: S, request: Any, context: grpc.ServicerContext) -> Iterator[pb.RowsChunk]:
        try:
            for data in method(servicer, request):
                yield pb.RowsChunk(data=data)
        except Exception as exc:
            _abort(context, method.__name__, exc)

    return call
