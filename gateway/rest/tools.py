"""Tools and their calls in a chat's body, to the service's records."""

from __future__ import annotations

import json

from gateway.errors import InvalidRequest
from gateway.exchange import Tool, ToolCall, ToolChoice, Tools
from gateway.rest.schemas import ChatBody, FunctionBody, MessageBody, NamedTool


def read_tools(body: ChatBody) -> Tools | None:
    """None where nothing may be called: then the model is told of no tools. Raises InvalidRequest."""
    if body.functions:
        raise InvalidRequest("functions are not supported: give them as tools.", "functions")
    tools = tuple(_read_tool(tool.function) for tool in body.tools or ())
    named: str | None = None
    choice = ToolChoice.AUTO
    match body.tool_choice:
        case "none":
            return None
        case "required":
            choice = ToolChoice.REQUIRED
        case NamedTool(function=function):
            choice, named = ToolChoice.REQUIRED, function.name
    return checked(Tools(tools, choice, named, body.parallel_tool_calls is not False))


def checked(asked: Tools) -> Tools | None:
    """None for no tools at all. Raises InvalidRequest for two of one name, and where the one to call is not there."""
    if len({tool.name for tool in asked.tools}) < len(asked.tools):
        raise InvalidRequest("Two tools have the same name.", "tools")
    if asked.choice is ToolChoice.REQUIRED and not asked.callable:
        missing = "tools is empty" if asked.named is None else f"no tool has the name {asked.named[:64]!r}"
        raise InvalidRequest(f"tool_choice asks for a call, but {missing}.", "tool_choice")
    return asked if asked.tools else None


def read_calls(message: MessageBody) -> tuple[ToolCall, ...]:
    """An assistant's. Raises InvalidRequest for arguments that are no JSON object."""
    calls = tuple(
        ToolCall(call.id, call.function.name, call.function.arguments or "{}")
        for call in message.tool_calls or ()
    )
    for call in calls:
        check_arguments(call.id, call.arguments, "messages")
    return calls


def check_arguments(call_id: str, arguments: str, param: str) -> str:
    """The arguments of a call. Raises InvalidRequest where they are no JSON object."""
    try:
        is_object = type(json.loads(arguments)) is dict
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise InvalidRequest(f"The arguments of call {call_id[:64]!r} are no JSON object.", param)
    return arguments


def _read_tool(function: FunctionBody) -> Tool:
    parameters = {"type": "object"} if function.parameters is None else function.parameters
    return Tool(function.name, function.description, parameters, bool(function.strict))
