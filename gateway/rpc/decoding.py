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
    decode, behaviour = handler.request_deserializer, handler.unary_stream or handler.unary_unary

    async def checked(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            request = decode(data)
        except DecodeError:
            await abort(context, InvalidRequest("The message cannot be decoded: see chat.proto."))
        return await behaviour(request, context)

    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    # no deserializer: `checked` is given the bytes; a stream's behaviour writes its events itself
    return make(checked, response_serializer=handler.response_serializer)
