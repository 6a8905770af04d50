"""Calls and tools for models whose chat template has no place for them, or takes one call a message."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

from gateway.exchange import Message, Tool
from gateway.tool_calls.arguments import read_arguments
from gateway.tool_calls.families import CallFormat

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
