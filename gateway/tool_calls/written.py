"""Turns of earlier answers as templates take them: text and calls, with tools as text where a template knows none."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

from gateway.exchange import Message, Tool
from gateway.json_limits import read_json
from gateway.tool_calls.families import CallFormat

# Anthropic's name for arguments that are not a JSON object
INVALID = "INVALID_JSON"
# so deep they fit into a body beside what is around them
MAX_DEPTH = 100
# no tokenizer should see it
NUL, REPLACED = "\x00", "\ufffd"


def taken_back(message: Message) -> Message:
    """The message; an assistant's with U+FFFD for NUL characters, which a model may write and a client may not."""
    reasoning = message.reasoning or ""
    if message.role != "assistant" or (NUL not in message.content and NUL not in reasoning):
        return message
    content = message.content.replace(NUL, REPLACED)
    return replace(message, content=content, reasoning=reasoning.replace(NUL, REPLACED) or None)


def read_arguments(text: str) -> dict[str, Any]:
    """The object that the text is; of any other text, such as a call that was cut off, an object that holds it.

    Every JSON parser and every tokenizer takes the result: NaN and infinities are null, NUL characters and halves of
    surrogate pairs U+FFFD.
    """
    try:
        found = _plain(read_json(text), MAX_DEPTH)
    except ValueError:
        found = None
    return found if type(found) is dict else {INVALID: text.replace(NUL, REPLACED)}


def _plain(value: Any, depth: int) -> Any:
    """Raises ValueError for a value that is nested deeper than this."""
    if not depth:
        raise ValueError("too deep")
    match value:
        case str():
            return value.replace(NUL, REPLACED)
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {_plain(name, depth): _plain(each, depth - 1) for name, each in value.items()}
        case [*_]:
            return [_plain(each, depth - 1) for each in value]
    return value


SYSTEM = ("system", "developer")
INSTRUCTION = (
    "You can call functions. Each is described by a line of JSON:\n{tools}\n"
    "To call one, write its name and arguments, and nothing else, like this:\n{example}"
)


def tool_json(tool: Tool) -> dict[str, Any]:
    """As OpenAI writes it, which is what templates take."""
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def as_text(messages: Sequence[Message], tools: Sequence[Tool], calls: CallFormat) -> tuple[Message, ...]:
    """The same chat in messages that have texts only, of the roles that every template knows. Tools stand in the
    system's message, calls in the assistant's, and what tools answer in the user's."""
    written = list(_written(messages, calls))
    if not tools:
        return tuple(written)
    lines = "\n".join(json.dumps(tool_json(tool)["function"], ensure_ascii=False) for tool in tools)
    example = calls.written("NAME", {"ARGUMENT": "VALUE"})
    instruction = INSTRUCTION.format(tools=lines, example=example)
    if written and written[0].role in SYSTEM:
        return (replace(written[0], content=f"{written[0].content}\n\n{instruction}"), *written[1:])
    return (Message("system", instruction), *written)


def one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """The same chat in messages of one call each, every call before its answer."""
    left = deque(messages)
    while left:
        message = left.popleft()
        if len(message.tool_calls) < 2:
            yield message
            continue
        answers = defaultdict[str | None, deque[Message]](deque)
        while left and left[0].role == "tool":
            answers[left[0].tool_call_id].append(left.popleft())
        for at, call in enumerate(message.tool_calls):
            yield replace(message, tool_calls=(call,)) if not at else Message(message.role, "", (call,))
            if answers[call.id]:
                yield answers[call.id].popleft()
        yield from chain.from_iterable(answers.values())


def _written(messages: Sequence[Message], calls: CallFormat) -> Iterator[Message]:
    for is_tool, group in groupby(messages, lambda message: message.role == "tool"):
        if is_tool:
            answers = (f"<tool_response>\n{message.content}\n</tool_response>" for message in group)
            yield Message("user", "\n".join(answers))
            continue
        for message in group:
            texts = [calls.written(call.name, read_arguments(call.arguments)) for call in message.tool_calls]
            content = "\n".join(filter(None, [message.content, *texts]))
            yield Message(message.role, content, name=message.name)
