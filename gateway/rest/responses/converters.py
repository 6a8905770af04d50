"""Bodies of `/v1/responses` to the service's records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.errors import InvalidRequest
from gateway.exchange import ChatRequest, GenerationOptions, Message
from gateway.rest.converters import read_carrel
from gateway.rest.responses.schemas import Item, ResponsesBody
from gpu_worker.v1 import gpu_worker_pb2 as pb

LOGPROBS = "message.output_text.logprobs"
# What would change the answer, with the value that changes nothing beside null.
UNSUPPORTED: Mapping[str, Any] = {
    "background": False,
    "context_management": None,
    "conversation": None,
    "prompt": None,
    "tools": [],
}


def read_input(body: ResponsesBody) -> tuple[Message, ...]:
    """The new messages. Raises InvalidRequest for anything but text."""
    if isinstance(body.input, str):
        return (Message("user", body.input),)
    return tuple(_read_item(item) for item in body.input)


def read_response_request(
    body: ResponsesBody,
    before: tuple[Message, ...],
    session_id: str,
    request_id: str | None,
    caller: bytes,
) -> ChatRequest:
    """before: what was said in the turns that it goes on from. Raises InvalidRequest for what this server does not
    do."""
    _check_fields(body)
    sampling = pb.SamplingParams()
    of_body = {"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p}
    for name, value in of_body.items():
        if value is not None:
            setattr(sampling, name, value)
    if LOGPROBS in (body.include or ()):
        sampling.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidRequest(f"top_logprobs needs {LOGPROBS!r} in include.", "top_logprobs")
    draft = pb.GenerateRequest(
        sampling=sampling,
        session_id=session_id,
        prefix_salt=caller,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )
    read_carrel(body.carrel, draft)
    instructions = [] if body.instructions is None else [Message("system", body.instructions)]
    messages = (*instructions, *before, *read_input(body))
    options = GenerationOptions(body.model, timeout_s=body.timeout_seconds, draft=draft)
    return ChatRequest(messages, options, request_id=request_id)


def _check_fields(body: ResponsesBody) -> None:
    fields = body.model_extra or {}
    for name, value in fields.items():
        if name in UNSUPPORTED and value is not None and value != UNSUPPORTED[name]:
            raise InvalidRequest(f"{name} is not supported: leave it out.", name)
    if fields.get("tool_choice") not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice is not supported: this route calls no tools.", "tool_choice")
    if body.truncation == "auto":
        raise InvalidRequest("truncation 'auto' is not supported: send a shorter input.", "truncation")
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        raise InvalidRequest("Of text.format only the type 'text' is supported.", "text.format")
    for name in body.include or ():
        if name != LOGPROBS:
            raise InvalidRequest(f"include has {name[:64]!r}: only {LOGPROBS!r} is supported.", "include")


def _read_item(item: Item) -> Message:
    if item.type != "message" or item.role is None or item.content is None:
        raise InvalidRequest("Only items of type 'message' with role and content are supported.", "input")
    match item.content:
        case str():
            return Message(item.role, item.content)
        case parts:
            known = ("input_text", "output_text", "text")
            if any(part.type not in known or part.text is None for part in parts):
                raise InvalidRequest("Only parts of text are supported: this model reads text.", "input")
            return Message(item.role, "".join(part.text or "" for part in parts))
