"""Bodies of `/v1/responses` to the service's records: calls and their answers are items there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from gateway.errors import InvalidRequest
from gateway.exchange import ChatRequest, Message, Tool, ToolCall, Tools
from gateway.grammars import format_grammars, only_one
from gateway.rest.options import read_options
from gateway.rest.responses.function_names import FunctionNames
from gateway.rest.responses.schemas import (
    AllowedFunctions,
    FunctionTool,
    InputItem,
    NamedFunction,
    OfferedTool,
    Part,
    ResponsesBody,
    TextFormat,
)
from gateway.rest.unsupported import refuse_unsupported
from gateway.tool_calls.checks import MAX_TOOLS, offered

NO_FUNCTIONS = FunctionNames()


def read_input(
    asked: str | Sequence[InputItem], functions: FunctionNames = NO_FUNCTIONS
) -> tuple[Message, ...]:
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
        calls = tuple(_read_call(item, functions) for item in items)
        names |= {call.id: call.name for call in calls}
        if not messages or messages[-1].role != "assistant":
            messages.append(Message("assistant", ""))
        messages[-1] = replace(messages[-1], tool_calls=calls)
    return tuple(messages)


def _read_call(item: InputItem, functions: FunctionNames) -> ToolCall:
    if item.call_id is None or item.name is None:
        raise InvalidRequest("An item of type function_call needs call_id and name.", "input")
    return ToolCall(item.call_id, functions.flat(item.name, item.namespace), item.arguments or "{}")


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


LOGPROBS = "message.output_text.logprobs"
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def read_response_request(
    body: ResponsesBody,
    functions: FunctionNames,
    before: tuple[Message, ...],
    session_id: str,
    request_id: str | None,
    caller: bytes,
) -> ChatRequest:
    """functions: those of its tools. before: what was said in the turns that it goes on from. Raises InvalidRequest for
    what this server does not do."""
    _check_fields(body)
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise InvalidRequest(f"top_logprobs needs {LOGPROBS!r} in include.", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if has_logprobs else None
    sampling = {"max_tokens": body.max_output_tokens, "logprobs": logprobs}
    asked = (body.text and body.text.format) or TextFormat(type="text")
    grammar = only_one(format_grammars(asked.type, asked.json_schema, "text.format", "schema"))
    options = read_options(body, caller, session_id, sampling, grammar, timeout_s=body.timeout_seconds)
    instructions = [] if body.instructions is None else [Message("system", body.instructions)]
    messages = (*instructions, *before, *read_input(body.input, functions))
    if not messages:
        raise InvalidRequest("input is empty: give a text, or at least one message.", "input")
    return ChatRequest(
        messages, options, request_id=request_id, tools=_read_tools(body, functions), tells_reasoning=True
    )


def _check_fields(body: ResponsesBody) -> None:
    refuse_unsupported(body)
    if body.truncation == "auto":
        raise InvalidRequest("truncation 'auto' is not supported: send a shorter input.", "truncation")
    for name in body.include or ():
        if name != LOGPROBS:
            raise InvalidRequest(f"include has {name[:64]!r}: only {LOGPROBS!r} is supported.", "include")


def _read_tools(body: ResponsesBody, functions: FunctionNames) -> Tools | None:
    tools = tuple(read for tool in body.tools or () for read in _read_tool(tool, functions))
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} functions: at most {MAX_TOOLS} are taken.", "tools")
    is_parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case NamedFunction(name=name):
            return offered(tools, named=name, is_parallel=is_parallel)
        case AllowedFunctions(mode=mode, tools=allowed):
            return offered(tools, mode, allowed={tool.name for tool in allowed}, is_parallel=is_parallel)
        case word:
            return offered(tools, word or "auto", is_parallel=is_parallel)


def _read_tool(tool: OfferedTool, functions: FunctionNames) -> Iterator[Tool]:
    """The functions of a tool; the description of a namespace is part of those of its functions."""
    if tool.type == "function":
        yield _read_function(tool, tool.name, tool.description)
        return
    for each in tool.tools or ():
        description = "\n".join(filter(None, (tool.description, each.description)))
        yield _read_function(each, functions.flat(each.name, tool.name), description)


def _read_function(tool: FunctionTool, name: str, description: str | None) -> Tool:
    return Tool(
        name, description, ANY_OBJECT if tool.parameters is None else tool.parameters, bool(tool.strict)
    )
