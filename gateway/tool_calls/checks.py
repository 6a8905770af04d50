"""Checks of a chat's tools in any protocol."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from gateway.errors import InvalidRequest
from gateway.exchange import Message, Tool, ToolChoice, Tools
from gateway.json_limits import MAX_NESTED, check_count, check_json

MAX_TOOLS = 128
FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


def checked(asked: Tools) -> Tools | None:
    """None for no tools at all; one that is named is called once, as OpenAI has it. Raises InvalidRequest for two of
    one name, and where the one to call is not there."""
    if len({tool.name for tool in asked.tools}) < len(asked.tools):
        raise InvalidRequest("Two tools have the same name.", "tools")
    if asked.choice is ToolChoice.REQUIRED and not asked.callable:
        missing = "tools is empty" if asked.named is None else f"no tool has the name {asked.named[:64]!r}"
        raise InvalidRequest(f"tool_choice asks for a call, but {missing}.", "tool_choice")
    if asked.named is not None:
        # clients that force a call read the first alone, or take several for an error
        asked = replace(asked, is_parallel=False)
    return asked if asked.tools else None


def only(tools: tuple[Tool, ...], names: Set[str]) -> tuple[Tool, ...]:
    """The tools of these names: the model is told of no others. Raises InvalidRequest where one is not there."""
    if missing := names - {tool.name for tool in tools}:
        raise InvalidRequest(
            f"tool_choice allows a tool that is not there: {min(missing)[:64]!r}.", "tool_choice"
        )
    return tuple(tool for tool in tools if tool.name in names)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise TooLarge for a chat, earlier turns included, that has too many messages, or too much in their calls."""
    check_count(len(messages), "messages", MAX_NESTED)
    calls = [call for message in messages for call in message.tool_calls]
    check_count(len(messages) + len(calls), "messages and calls", MAX_NESTED)
    check_json("".join(call.arguments for call in calls).encode())
