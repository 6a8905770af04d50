"""Bodies of `/v1/responses` to the service's records."""

from __future__ import annotations

from typing import Any

from gateway.errors import InvalidRequest
from gateway.exchange import ChatRequest, Message, Tool, ToolChoice, Tools
from gateway.grammars import ANY_OBJECT, json_grammar
from gateway.rest.options import read_options
from gateway.rest.responses.input import read_input
from gateway.rest.responses.schemas import AllowedFunctions, NamedFunction, ResponsesBody, TextFormat
from gateway.rest.unsupported import refuse_unsupported
from gateway.tool_calls.checks import checked, only
from gpu_worker.v1 import gpu_worker_pb2 as pb

LOGPROBS = "message.output_text.logprobs"


def read_response_request(
    body: ResponsesBody,
    before: tuple[Message, ...],
    session_id: str,
    request_id: str | None,
    caller: bytes,
) -> ChatRequest:
    """before: what was said in the turns that it goes on from. Raises InvalidRequest for what this server does not
    do."""
    _check_fields(body)
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise InvalidRequest(f"top_logprobs needs {LOGPROBS!r} in include.", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if has_logprobs else None
    sampling = {"max_tokens": body.max_output_tokens, "logprobs": logprobs}
    grammar = _read_format(body)
    options = read_options(body, caller, session_id, sampling, grammar, timeout_s=body.timeout_seconds)
    instructions = [] if body.instructions is None else [Message("system", body.instructions)]
    messages = (*instructions, *before, *read_input(body.input))
    if not messages:
        raise InvalidRequest("input is empty: give a text, or at least one message.", "input")
    return ChatRequest(
        messages, options, request_id=request_id, tools=_read_tools(body), tells_reasoning=True
    )


def _check_fields(body: ResponsesBody) -> None:
    refuse_unsupported(body)
    if body.truncation == "auto":
        raise InvalidRequest("truncation 'auto' is not supported: send a shorter input.", "truncation")
    for name in body.include or ():
        if name != LOGPROBS:
            raise InvalidRequest(f"include has {name[:64]!r}: only {LOGPROBS!r} is supported.", "include")


def _read_tools(body: ResponsesBody) -> Tools | None:
    """None where nothing may be called: then the model is told of no tools. Raises InvalidRequest."""
    any_object: dict[str, Any] = {"type": "object"}
    tools = tuple(
        Tool(
            tool.name,
            tool.description,
            any_object if tool.parameters is None else tool.parameters,
            bool(tool.strict),
        )
        for tool in body.tools or ()
    )
    choice, named = ToolChoice.AUTO, None
    match body.tool_choice:
        case "none":
            return None
        case "required":
            choice = ToolChoice.REQUIRED
        case NamedFunction(name=name):
            choice, named = ToolChoice.REQUIRED, name
        case AllowedFunctions(mode=mode, tools=allowed):
            choice = ToolChoice(mode)
            tools = only(tools, {tool.name for tool in allowed})
    return checked(Tools(tools, choice, named, body.parallel_tool_calls is not False))


def _read_format(body: ResponsesBody) -> pb.Grammar | None:
    """Return the grammar of the text; None: anything. Raises InvalidRequest."""
    param = "text.format"
    match body.text.format if body.text is not None else None:
        case None | TextFormat(type="text"):
            return None
        case TextFormat(type="json_object"):
            return json_grammar(ANY_OBJECT, param)
        case TextFormat(type="json_schema", json_schema=schema) if schema is not None:
            return json_grammar(schema, param)
    raise InvalidRequest("text.format is text, json_object, or json_schema with a schema.", param)
