"""Checks of a chat's tools in any protocol."""

from __future__ import annotations

from collections.abc import Sequence, Set

from gateway.errors import InvalidRequest
from gateway.exchange import Message, Tool, ToolChoice, Tools
from gateway.json_limits import MAX_NESTED, check_count, check_json

MAX_TOOLS = 128
FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


def offered(
    tools: tuple[Tool, ...],
    choice: str = "auto",
    named: str | None = None,
    allowed: Set[str] | None = None,
    is_parallel: bool = True,
) -> Tools | None:
    """The tools that a chat offers; None where nothing may be called: then the model is told of no tools.

    choice: auto, required or none. named: the only one that may be called, and must, once: clients that force a call
    read the first alone, or take several for an error. allowed: the only ones that the model is told of; None: all.
    Raises InvalidRequest for two tools of one name, and where one to call is not there.
    """
    if choice == "none":
        return None
    if allowed is not None:
        if missing := allowed - {tool.name for tool in tools}:
            raise InvalidRequest(
                f"tool_choice allows a tool that is not there: {min(missing)[:64]!r}.", "tool_choice"
            )
        tools = tuple(tool for tool in tools if tool.name in allowed)
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequest("Two tools have the same name.", "tools")
    must = ToolChoice(choice) if named is None else ToolChoice.REQUIRED
    asked = Tools(tools, must, named, is_parallel and named is None)
    if must is ToolChoice.REQUIRED and not asked.callable:
        missing_one = "tools is empty" if named is None else f"no tool has the name {named[:64]!r}"
        raise InvalidRequest(f"tool_choice asks for a call, but {missing_one}.", "tool_choice")
    return asked if tools else None


def check_messages(messages: Sequence[Message]) -> None:
    """Raise TooLarge for a chat, earlier turns included, that has too many messages, or too much in their calls."""
    check_count(len(messages), "messages", MAX_NESTED)
    calls = [call for message in messages for call in message.tool_calls]
    check_count(len(messages) + len(calls), "messages and calls", MAX_NESTED)
    check_json("".join(call.arguments for call in calls).encode())
