"""Messages that cannot be read are the client's error, where gRPC itself would call them the server's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gateway.errors import InvalidRequest
from gateway.rpc.errors import abort


class DecodeInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls of a service's methods that take one message with INVALID_ARGUMENT if it is none."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        is_own = handler_call_details.method.startswith(self._prefix)
        return _checked(handler) if handler is not None and is_own else handler


def _checked(handler: Any) -> grpc.RpcMethodHandler:
    def read(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            return None

    async def check(request: Any, context: grpc.aio.ServicerContext) -> None:
        if request is None:
            await abort(context, InvalidRequest("The message cannot be decoded: see chat.proto."))

    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await check(request, context)
        return await handler.unary_unary(request, context)

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> None:
        await check(request, context)
        # it writes its events itself
        await handler.unary_stream(request, context)

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, read, handler.response_serializer)
    return grpc.unary_unary_rpc_method_handler(answer, read, handler.response_serializer)
