"""Tools and their calls in a chat's body, to the service's records."""

from __future__ import annotations

from gateway.errors import InvalidRequest
from gateway.exchange import Tool, ToolCall, ToolChoice, Tools
from gateway.rest.schemas import AllowedChoice, ChatBody, FunctionBody, MessageBody, NamedTool
from gateway.tool_calls.checks import checked, only


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
        case AllowedChoice(allowed_tools=allowed):
            choice = ToolChoice(allowed.mode)
            tools = only(tools, {tool.function.name for tool in allowed.tools})
    return checked(Tools(tools, choice, named, body.parallel_tool_calls is not False))


def read_calls(message: MessageBody) -> tuple[ToolCall, ...]:
    """An assistant's."""
    return tuple(
        ToolCall(call.id, call.function.name, call.function.arguments or "{}")
        for call in message.tool_calls or ()
    )


def _read_tool(function: FunctionBody) -> Tool:
    parameters = {"type": "object"} if function.parameters is None else function.parameters
    return Tool(function.name, function.description, parameters, bool(function.strict))
