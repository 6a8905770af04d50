"""Items of a response's input to the service's messages: calls and their answers are items of their own there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from gateway.errors import InvalidRequest
from gateway.exchange import Message, ToolCall
from gateway.rest.responses.schemas import InputItem, Part


def read_input(asked: str | Sequence[InputItem]) -> tuple[Message, ...]:
    """An assistant's text and calls in a row are one message; what a model thought is left out. Raises InvalidRequest
    for what is neither text nor a call."""
    if isinstance(asked, str):
        return (Message("user", asked),)
    messages: list[Message] = []
    names: dict[str, str] = {}
    said = (item for item in asked if item.type != "reasoning")
    for is_call, items in groupby(said, lambda item: item.type == "function_call"):
        if not is_call:
            messages += [_read_message(item, names) for item in items]
            continue
        calls = tuple(map(_read_call, items))
        names |= {call.id: call.name for call in calls}
        if not messages or messages[-1].role != "assistant":
            messages.append(Message("assistant", ""))
        messages[-1] = replace(messages[-1], tool_calls=calls)
    return tuple(messages)


def _read_call(item: InputItem) -> ToolCall:
    if item.call_id is None or item.name is None:
        raise InvalidRequest("An item of type function_call needs call_id and name.", "input")
    return ToolCall(item.call_id, item.name, item.arguments or "{}")


def _read_message(item: InputItem, names: Mapping[str, str]) -> Message:
    """names: of the tools that were called, by the calls' ids."""
    match item:
        case InputItem(type="message", role=str() as role, content=content) if content is not None:
            return Message(role, _text(content))
        case InputItem(type="function_call_output", call_id=str() as call_id, output=output):
            return Message("tool", _text(output or ""), tool_call_id=call_id, name=names.get(call_id))
    raise InvalidRequest(
        "Only items of the types message (with role and content), function_call, function_call_output and reasoning "
        "are supported.",
        "input",
    )


def _text(content: str | list[Part]) -> str:
    match content:
        case str():
            return content
        case parts:
            known = ("input_text", "output_text", "text")
            if any(part.type not in known or part.text is None for part in parts):
                raise InvalidRequest("Only parts of text are supported: this model reads text.", "input")
            return "".join(part.text or "" for part in parts)
