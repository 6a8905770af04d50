"""Decoding and error translation around every method of Carrel's services, with the table from errors to statuses."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from carrel.process.request_limits import CODE_KEY, PARAM_KEY
from gpu_worker.errors import (
    CapacityError,
    EngineStopped,
    NeverFits,
    RequestError,
    SlowConsumer,
    StoreUnavailable,
    VersionMismatch,
    WorkerError,
)

logger = logging.getLogger(__name__)

STORE_UNAVAILABLE = "store_unavailable"

_CODES: dict[type[WorkerError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    NeverFits: grpc.StatusCode.INVALID_ARGUMENT,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
    EngineStopped: grpc.StatusCode.UNAVAILABLE,
    SlowConsumer: grpc.StatusCode.ABORTED,
    WorkerError: grpc.StatusCode.INTERNAL,
}


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Bytes that are no message become INVALID_ARGUMENT, errors their status; no traceback leaves.

    For methods that are coroutines of one request; a streaming one uses `context.write`.
    Left to itself gRPC answers undecodable bytes with an internal error and shows a Python exception's text.
    """

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        guarded = _guard(handler.unary_stream or handler.unary_unary, handler.request_deserializer)
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        # no deserializer: `guarded` is given the bytes
        return make(guarded, response_serializer=handler.response_serializer)


def _guard(behaviour: Callable[..., Awaitable[Any]], decode: Callable[[bytes], Any]) -> Any:
    async def guarded(message: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behaviour(_decode(message, decode), context)
        except Exception as error:
            await _abort(context, error)

    return guarded


def _decode(message: bytes, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(message)
    except DecodeError as error:
        raise RequestError("The bytes received are not a message of this method.", "request") from error


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """End the call with the error's status. Only a WorkerError's text reaches the caller."""
    metadata: tuple[tuple[str, str], ...] = ()
    match error:
        case RequestError(param=param, code=code):
            metadata = ((PARAM_KEY, param), *([(CODE_KEY, code)] if code else []))
        case NeverFits():
            # Another try would fail too, and a shorter prompt would not.
            metadata = ((CODE_KEY, "context_length_exceeded"),)
        case StoreUnavailable():
            metadata = ((CODE_KEY, STORE_UNAVAILABLE),)
    for kind in type(error).__mro__:
        if kind in _CODES:
            await context.abort(_CODES[kind], str(error), metadata)
    logger.error("a call failed", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "Internal error; the worker's log has the cause.")
