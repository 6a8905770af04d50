"""Items of a response's input to the service's messages: calls and their answers are items of their own there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.errors import InvalidRequest
from gateway.exchange import Message, ToolCall
from gateway.rest.responses.schemas import InputItem, Part
from gateway.tool_calls.checks import check_arguments


def read_input(asked: str | Sequence[InputItem]) -> tuple[Message, ...]:
    """An assistant's text and calls in a row are one message; what a model thought is left out. Raises InvalidRequest
    for what is neither text nor a call."""
    if isinstance(asked, str):
        return (Message("user", asked),)
    messages: list[Message] = []
    for item in asked:
        match item:
            case InputItem(type="message", role=str() as role, content=content) if content is not None:
                messages.append(Message(role, _text(content)))
            case InputItem(type="function_call", call_id=str() as call_id, name=str() as name):
                call = ToolCall(call_id, name, check_arguments(call_id, item.arguments or "{}", "input"))
                if not messages or messages[-1].role != "assistant":
                    messages.append(Message("assistant", ""))
                messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
            case InputItem(type="function_call_output", call_id=str() as call_id, output=output):
                names = [call.name for said in messages for call in said.tool_calls if call.id == call_id]
                called = names[-1] if names else None
                messages.append(Message("tool", _text(output or ""), tool_call_id=call_id, name=called))
            case InputItem(type="reasoning"):
                pass
            case _:
                raise InvalidRequest(
                    "Only items of the types message (with role and content), function_call, function_call_output and "
                    "reasoning are supported.",
                    "input",
                )
    return tuple(messages)


def _text(content: str | list[Part]) -> str:
    match content:
        case str():
            return content
        case parts:
            known = ("input_text", "output_text", "text")
            if any(part.type not in known or part.text is None for part in parts):
                raise InvalidRequest("Only parts of text are supported: this model reads text.", "input")
            return "".join(part.text or "" for part in parts)
