"""Messages that cannot be read are the client's error, where gRPC itself would call them the server's; and those that
are too long in decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from gateway.errors import InvalidRequest, TooLarge
from gateway.rpc.errors import abort
from gateway.rpc.fields import check_fields


class DecodeInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls of a service's methods that take one message with INVALID_ARGUMENT if it is none or has unknown
    fields, and with RESOURCE_EXHAUSTED if it has too many."""

    def __init__(self, service: ServiceDescriptor) -> None:
        self._methods = {f"/{service.full_name}/{each.name}": each.input_type for each in service.methods}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        kind = self._methods.get(handler_call_details.method)
        return handler if handler is None or kind is None else _checked(handler, kind)


def _checked(handler: Any, kind: Descriptor) -> grpc.RpcMethodHandler:
    decode, behaviour = handler.request_deserializer, handler.unary_stream or handler.unary_unary

    async def checked(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            check_fields(data, kind)
            # others have a turn
            await asyncio.sleep(0)
            request = decode(data)
        except (TooLarge, InvalidRequest) as error:
            await abort(context, error)
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
