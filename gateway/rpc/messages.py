"""How the one message of a call is received: within a time, and where there is memory for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc

from gateway.auth import KeyRing, only
from gateway.body_limits import BodyLimits, BodyRoom
from gateway.errors import InvalidRequest, ServiceError, SlowBody
from gateway.rpc.errors import abort

# gRPC's own default
MAX_MESSAGE_BYTES = 4 * 2**20
# of the messages of calls without a key
OPEN_BYTES = 16 * MAX_MESSAGE_BYTES


def shown_key(metadata: Iterable[Any] | None) -> str | None:
    """The value of `authorization`; None where it is missing or given more than once."""
    return only([str(value) for name, value in metadata or () if name == "authorization"])


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """Receives the message of a call of a method that takes one.

    gRPC's own server takes memory for every message that a client begins to send, and waits without an end for one
    that never comes. Here the call holds room in the budget of request bodies before its message is read.
    """

    def __init__(self, keys: KeyRing, bodies: BodyLimits) -> None:
        self._keys = keys
        self._bodies = bodies
        self._open = BodyRoom(OPEN_BYTES)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        decode, behaviour = handler.request_deserializer, handler.unary_stream or handler.unary_unary
        key = shown_key(handler_call_details.invocation_metadata)

        async def receive(messages: Any, context: grpc.aio.ServicerContext) -> None:
            try:
                request = await self._receive(key, decode, context)
            except ServiceError as error:
                await abort(context, error)
                return
            answer = await behaviour(request, context)
            if not handler.response_streaming:
                await context.write(answer)

        return grpc.stream_stream_rpc_method_handler(receive, response_serializer=handler.response_serializer)

    async def _receive(
        self, key: str | None, decode: Callable[[bytes], Any] | None, context: grpc.aio.ServicerContext
    ) -> Any:
        caller = self._keys.caller(key)
        room = self._open if caller is None else self._bodies.room
        async with room.taken(caller or address_of(context.peer()), MAX_MESSAGE_BYTES):
            try:
                async with asyncio.timeout(self._bodies.timeout_s):
                    data = await context.read()
            except TimeoutError as exc:
                raise SlowBody(self._bodies.timeout_s) from exc
            if data is grpc.aio.EOF:  # type: ignore[attr-defined]
                raise InvalidRequest("The call ended without a message.")
            return data if decode is None else decode(data)


def address_of(peer: str) -> bytes:
    """The address in gRPC's name of a client, without its port."""
    return peer.rpartition(":")[0].encode()
