"""Messages of chat gRPC by a seed, from their own descriptors, and what is wrong with how they end."""

from __future__ import annotations

import random
from typing import Any

import grpc
from fuzz_values import HOSTILE, SAMPLES, WRONG
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gateway.v1 import chat_pb2 as pb

PATIENCE_S = 120.0
SERVERS_FAULT = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
# a message's texts are UTF-8
TEXTS = [value for value in HOSTILE if isinstance(value, str) and "\ud800" not in value]
NUMBERS = [0, 1, 2, 3, 20, 2**31 - 1, 2**32 - 1, 2**64 - 1, -1, -(2**31)]
FLOATS = [0.0, 0.1, 1.0, 2.0, -2.0, 1e-45, 3e38, float("nan"), float("inf"), float("-inf")]


def message(seed: int) -> bytes:
    """A ChatRequest, or what is none."""
    rng = random.Random(seed)
    request = pb.ChatRequest()
    _fill(rng, request, rng.choice((*WRONG.values(), 0.0)), 0)
    request.max_tokens = rng.randint(1, 4)
    data = request.SerializeToString()
    if rng.random() < 0.1:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.randbytes(rng.randint(0, 9)) + data[at + rng.randint(0, 9) :]
    return data


def send(channel: grpc.Channel, data: bytes) -> tuple[str, list[str]]:
    """The status of its call, all of which is read, and what the server did wrong."""
    call = channel.unary_stream(
        "/carrel.gateway.v1.Chat/Complete", response_deserializer=pb.ChatEvent.FromString
    )
    try:
        events = list(call(data, timeout=PATIENCE_S))
    except grpc.RpcError as error:
        return error.code().name, [error.details()] if error.code() in SERVERS_FAULT else []
    return "OK", [event.error.message for event in events if event.error.code >= 500]


def _fill(rng: random.Random, target: Message, wrong: float, depth: int) -> None:
    for field in target.DESCRIPTOR.fields:
        is_wanted = field.name in ("messages", "role", "content")
        if depth > 3 or not (is_wanted or rng.random() < 0.12):
            continue
        parent = getattr(target, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(rng, parent, field, wrong)
        elif field.is_repeated:
            for _ in range(rng.choice((1, 1, 2, 3))):
                if field.message_type is not None:
                    _fill(rng, parent.add(), wrong, depth + 1)
                else:
                    parent.append(_value(rng, field, wrong))
        elif field.message_type is not None:
            parent.SetInParent()
            _fill(rng, parent, wrong, depth + 1)
        else:
            setattr(target, field.name, _value(rng, field, wrong))


def _fill_map(rng: random.Random, target: Any, field: FieldDescriptor, wrong: float) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    at = _value(rng, key, wrong)
    if value.message_type is None:
        target[at] = _value(rng, value, wrong)
    else:
        _fill(rng, target[at], wrong, 2)


def _value(rng: random.Random, field: FieldDescriptor, wrong: float) -> Any:
    """Return a value for a field that is not a message."""
    is_wrong = rng.random() < wrong
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            samples = [value for value in SAMPLES.get(field.name, ("a",)) if isinstance(value, str)]
            return rng.choice(TEXTS if is_wrong or not samples else samples)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 77))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(FLOATS if is_wrong else FLOATS[:4])
        case FieldDescriptor.CPPTYPE_UINT32:
            numbers = [each for each in NUMBERS if 0 <= each < 2**32]
        case FieldDescriptor.CPPTYPE_UINT64:
            numbers = [each for each in NUMBERS if each >= 0]
        case _:
            numbers = [each for each in NUMBERS if -(2**31) <= each < 2**31]
    return rng.choice(numbers if is_wrong else numbers[:4])
