"""Tools and their calls in a message, to the service's records."""

from __future__ import annotations

import re

from gateway.errors import InvalidRequest
from gateway.exchange import Tool, ToolCall, ToolChoice, Tools
from gateway.json_limits import check_json
from gateway.json_text import read_json
from gateway.tool_calls.checks import FUNCTION_NAME, MAX_TOOLS, checked
from gateway.v1 import chat_pb2 as pb


def read_tools(message: pb.ChatRequest) -> Tools | None:
    """None where nothing may be called: then the model is told of no tools. Raises InvalidRequest."""
    if len(message.tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(message.tools)} tools: give at most {MAX_TOOLS}.", "tools")
    check_json("".join(tool.parameters for tool in message.tools).encode())
    tools = tuple(_read_tool(tool) for tool in message.tools)
    is_parallel = message.parallel_tool_calls or not message.HasField("parallel_tool_calls")
    if message.tool_name:
        return checked(Tools(tools, ToolChoice.REQUIRED, message.tool_name, is_parallel))
    match message.tool_choice:
        case pb.TOOL_CHOICE_NONE:
            return None
        case pb.TOOL_CHOICE_REQUIRED:
            return checked(Tools(tools, ToolChoice.REQUIRED, None, is_parallel))
        case pb.TOOL_CHOICE_UNSPECIFIED | pb.TOOL_CHOICE_AUTO:
            return checked(Tools(tools, ToolChoice.AUTO, None, is_parallel))
    raise InvalidRequest(f"tool_choice has no value {message.tool_choice}: see chat.proto.", "tool_choice")


def read_calls(message: pb.Message) -> tuple[ToolCall, ...]:
    """An assistant's. Raises InvalidRequest for a name that is none."""
    for call in message.tool_calls:
        _check_name(call.name, "messages")
    return tuple(ToolCall(call.id, call.name, call.arguments or "{}") for call in message.tool_calls)


def _read_tool(tool: pb.Tool) -> Tool:
    _check_name(tool.name, "tools")
    try:
        parameters = read_json(tool.parameters or '{"type": "object"}')
    except ValueError:
        parameters = None
    if type(parameters) is not dict:
        raise InvalidRequest(f"The parameters of tool {tool.name!r} are no JSON object.", "tools")
    return Tool(tool.name, tool.description or None, parameters, tool.strict)


def _check_name(name: str, param: str) -> None:
    if not re.fullmatch(FUNCTION_NAME, name):
        raise InvalidRequest(
            f"A tool has the name {name[:64]!r}: give 1 to 64 letters, digits, '_', '.' or '-'.", param
        )
