"""Bodies of `/v1/messages` to the service's records."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from gateway.errors import InvalidRequest
from gateway.exchange import ChatRequest, GenerationOptions, Message
from gateway.rest.converters import read_carrel
from gateway.rest.messages.schemas import Block, CountBody, MessagesBody
from gpu_worker.v1 import gpu_worker_pb2 as pb

# What would change the answer, with the value that changes nothing beside null.
UNSUPPORTED: Mapping[str, Any] = {
    "container": None,
    "context_management": None,
    "mcp_servers": [],
    "output_config": None,
    "output_format": None,
    "tools": [],
}


def read_messages(body: CountBody) -> tuple[Message, ...]:
    """Text, that of blocks and of turns of one role in a row with line breaks between, the system's first. Raises
    InvalidRequest for anything but text."""
    system = [] if body.system is None else [Message("system", _text(body.system))]
    turns = groupby(body.messages, lambda turn: turn.role)
    joined = [Message(role, "\n".join(_text(turn.content) for turn in of_role)) for role, of_role in turns]
    return (*system, *joined)


def read_prompt(body: CountBody, options: GenerationOptions, request_id: str | None = None) -> ChatRequest:
    """A last turn of the assistant is gone on with. Raises InvalidRequest."""
    _check_fields(body)
    continues = bool(body.messages) and body.messages[-1].role == "assistant"
    return ChatRequest(
        read_messages(body),
        options,
        request_id=request_id,
        adds_generation_prompt=not continues,
        continues_final=continues,
    )


def read_message_request(body: MessagesBody, request_id: str | None, caller: bytes) -> ChatRequest:
    """Raises InvalidRequest for what this server does not do."""
    sampling = pb.SamplingParams(max_tokens=body.max_tokens)
    for name in ("temperature", "top_p"):
        if (value := getattr(body, name)) is not None:
            setattr(sampling, name, value)
    if body.top_k is not None:
        # -1 is off, as 0 is
        sampling.top_k = max(0, body.top_k)
    draft = pb.GenerateRequest(
        sampling=sampling,
        session_id=body.session_id or "",
        prefix_salt=caller,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )
    read_carrel(body.carrel, draft)
    options = GenerationOptions(
        body.model, stop=tuple(body.stop_sequences or ()), timeout_s=body.timeout_seconds, draft=draft
    )
    return read_prompt(body, options, request_id)


def _check_fields(body: CountBody) -> None:
    fields = body.model_extra or {}
    for name, value in fields.items():
        if name in UNSUPPORTED and value is not None and value != UNSUPPORTED[name]:
            raise InvalidRequest(f"{name} is not supported: leave it out.", name)
    match fields.get("thinking"):
        case None | {"type": "disabled"}:
            pass
        case _:
            raise InvalidRequest("thinking is not supported: leave it out, or disable it.", "thinking")


def _text(content: str | list[Block]) -> str:
    match content:
        case str():
            return content
        case blocks:
            if any(block.type != "text" or block.text is None for block in blocks):
                raise InvalidRequest(
                    "Only blocks of type 'text' are supported: this model reads text.", "messages"
                )
            return "\n".join(block.text or "" for block in blocks)
