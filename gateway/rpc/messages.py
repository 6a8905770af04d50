"""The one message of a call, received within a time, where there is memory for it, by turns; and errors as statuses.

gRPC's own server takes memory for every message that a client begins to send, waits without an end for one that never
comes, and calls a message that cannot be read the server's error, where it is the client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from carrel.process.request_limits import CODE_KEY, PARAM_KEY
from gateway.auth import KeyRing, only
from gateway.body_limits import BodyLimits, BodyRoom
from gateway.errors import InvalidRequest, Overloaded, ServiceError, SlowBody
from gateway.json_limits import check_count
from gateway.rest.errors import TYPES
from gateway.v1 import chat_pb2

RETRY_KEY = "carrel-retry-after"

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


async def abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    """End the call with the error's status; what more there is of `carrel-param`, `carrel-code` and
    `carrel-retry-after`, in seconds, goes into the trailing metadata."""
    pairs = ((PARAM_KEY, error.param), (CODE_KEY, error.code), (RETRY_KEY, error.retry_after_s))
    metadata = tuple((key, str(value)) for key, value in pairs if value)
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if error.code == Overloaded.code else CODES[error.status]
    await context.abort(code, error.message, trailing_metadata=metadata)


def error_event(error: ServiceError) -> chat_pb2.Error:
    """The same type and number as in the REST API."""
    kind = TYPES[error.status]
    return chat_pb2.Error(message=error.message, type=kind, param=error.param or "", code=error.status)


# gRPC's own default
MAX_MESSAGE_BYTES = 4 * 2**20
# of the messages of calls without a key
OPEN_BYTES = 16 * MAX_MESSAGE_BYTES
# a message of a chat is three at least
MAX_FIELDS = 2**15


def shown_key(metadata: Iterable[Any] | None) -> str | None:
    """The value of `authorization`; None where it is missing or given more than once."""
    return only([str(value) for name, value in metadata or () if name == "authorization"])


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """Receives the message of a call of a method that takes one, which holds room in the budget of request bodies
    before it is read. A message of the service is refused if it has unknown fields or too many, and is decoded by turns
    of the callers."""

    def __init__(self, service: ServiceDescriptor, keys: KeyRing, bodies: BodyLimits) -> None:
        """service: the one whose messages are checked; health and reflection are gRPC's own."""
        self._kinds = {f"/{service.full_name}/{each.name}": each.input_type for each in service.methods}
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
        behaviour = handler.unary_stream or handler.unary_unary
        kind = self._kinds.get(handler_call_details.method)
        caller = self._keys.caller(shown_key(handler_call_details.invocation_metadata))

        async def receive(messages: Any, context: grpc.aio.ServicerContext) -> None:
            try:
                request = await self._receive(caller, kind, handler.request_deserializer, context)
            except ServiceError as error:
                await abort(context, error)
                return
            answer = await behaviour(request, context)
            if not handler.response_streaming:
                await context.write(answer)

        return grpc.stream_stream_rpc_method_handler(receive, response_serializer=handler.response_serializer)

    async def _receive(
        self,
        caller: bytes | None,
        kind: Descriptor | None,
        decode: Callable[[bytes], Any],
        context: grpc.aio.ServicerContext,
    ) -> Any:
        room = self._open if caller is None else self._bodies.room
        async with room.taken(caller or address_of(context.peer()), MAX_MESSAGE_BYTES):
            try:
                async with asyncio.timeout(self._bodies.timeout_s):
                    data = await context.read()
            except TimeoutError as exc:
                raise SlowBody(self._bodies.timeout_s) from exc
            if data is grpc.aio.EOF:  # type: ignore[attr-defined]
                raise InvalidRequest("The call ended without a message.")
            if kind is None:
                return decode(data)
        async with self._bodies.turns.turn(caller or b"", len(data)):
            check_fields(data, kind)
            await asyncio.sleep(0)
            try:
                return decode(data)
            except DecodeError as exc:
                raise InvalidRequest("The message cannot be decoded: see chat.proto.") from exc
            finally:
                await asyncio.sleep(0)


def address_of(peer: str) -> bytes:
    """The address in gRPC's name of a client, without its port."""
    return peer.rpartition(":")[0].encode()


def check_fields(data: bytes, kind: Descriptor) -> None:
    """Check a message's fields before it is decoded: that is one call, which makes hundreds of bytes of two. Raises
    TooLarge where it has too many, those of messages within it among them, and InvalidRequest for one that its kind
    does not have. What cannot be decoded is left to the decoder."""
    left, count = [(0, len(data), kind)], 0
    try:
        while left:
            at, end, kind = left.pop()
            while at < end:
                count += 1
                check_count(count, "fields or more", MAX_FIELDS)
                tag, at = _varint(data, at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is None:
                    raise InvalidRequest(
                        f"{kind.name} has no field {tag >> 3} here: use the chat.proto of this server's version."
                    )
                # the format's wire types: a number, 8 bytes, so many bytes, 4 bytes
                match tag & 7:
                    case 0:
                        _, at = _varint(data, at)
                    case 1:
                        at += 8
                    case 2:
                        size, at = _varint(data, at)
                        if field.message_type is not None:
                            left.append((at, at + size, field.message_type))
                        at += size
                    case 5:
                        at += 4
    except IndexError:
        return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number there, and where it ends."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
