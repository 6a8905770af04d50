"""Decoding and error translation around every method of Carrel's services."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from gpu_worker.errors import RequestError, WorkerError
from gpu_worker.service.status_codes import status_of

logger = logging.getLogger(__name__)


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
    match error:
        case WorkerError():
            pass
        case _:
            logger.error("a call failed", exc_info=error)
    status = status_of(error)
    await context.abort(status.code, status.details, status.metadata)
