"""Messages that cannot be read are the client's error, where gRPC itself would call them the server's; and those that
are too long in decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from carrel.process.fair_turns import FairTurns
from gateway.auth import KeyRing
from gateway.errors import InvalidRequest, TooLarge
from gateway.rpc.errors import abort
from gateway.rpc.fields import check_fields
from gateway.rpc.messages import shown_key


class DecodeInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls of a service's methods that take one message with INVALID_ARGUMENT if it is none or has unknown
    fields, and with RESOURCE_EXHAUSTED if it has too many. Messages are decoded by turns of their callers."""

    def __init__(self, service: ServiceDescriptor, keys: KeyRing, turns: FairTurns) -> None:
        self._keys = keys
        self._turns = turns
        self._methods = {f"/{service.full_name}/{each.name}": each.input_type for each in service.methods}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        kind = self._methods.get(handler_call_details.method)
        if handler is None or kind is None:
            return handler
        # calls without a valid key do not come this far
        caller = self._keys.caller(shown_key(handler_call_details.invocation_metadata)) or b""
        return _checked(handler, kind, caller, self._turns)


def _checked(handler: Any, kind: Descriptor, caller: bytes, turns: FairTurns) -> grpc.RpcMethodHandler:
    decode, behaviour = handler.request_deserializer, handler.unary_stream or handler.unary_unary

    async def checked(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            async with turns.turn(caller, len(data)):
                check_fields(data, kind)
                await asyncio.sleep(0)
                request = decode(data)
                await asyncio.sleep(0)
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
