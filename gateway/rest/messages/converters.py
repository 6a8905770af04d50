"""Bodies of `/v1/messages` to the service's records."""

from __future__ import annotations

from gateway.errors import InvalidRequest
from gateway.exchange import ChatRequest, GenerationOptions, Tool, ToolChoice, Tools
from gateway.grammars import json_grammar
from gateway.rest.messages.schemas import CountBody, MessagesBody, OutputConfig, ToolChoiceBody
from gateway.rest.messages.turns import read_turns
from gateway.rest.options import read_options
from gateway.rest.unsupported import refuse_unsupported
from gateway.tool_calls.checks import checked
from gpu_worker.v1 import gpu_worker_pb2 as pb


def read_prompt(body: CountBody, options: GenerationOptions, request_id: str | None = None) -> ChatRequest:
    """A last turn of the assistant is gone on with. Raises InvalidRequest."""
    refuse_unsupported(body)
    continues = bool(body.messages) and body.messages[-1].role == "assistant"
    return ChatRequest(
        read_turns(body),
        options,
        request_id=request_id,
        adds_generation_prompt=not continues,
        continues_final=continues,
        tools=_read_tools(body),
        tells_reasoning=True,
    )


def read_message_request(body: MessagesBody, request_id: str | None, caller: bytes) -> ChatRequest:
    """Raises InvalidRequest for what this server does not do."""
    options = read_options(
        body,
        caller,
        body.session_id,
        {},
        _read_format(body.output_config),
        stop=tuple(body.stop_sequences or ()),
        timeout_s=body.timeout_seconds,
    )
    return read_prompt(body, options, request_id)


def _read_format(asked: OutputConfig | None) -> pb.Grammar | None:
    """Return the grammar of the text; None: anything."""
    if asked is None or asked.format is None:
        return None
    return json_grammar(asked.format.json_schema, "output_config.format")


def _read_tools(body: CountBody) -> Tools | None:
    """None where nothing may be called: then the model is told of no tools. Raises InvalidRequest."""
    tools = tuple(
        Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict)) for tool in body.tools or ()
    )
    asked = body.tool_choice or ToolChoiceBody(type="auto")
    if asked.type == "none":
        return None
    if asked.type == "tool" and asked.name is None:
        raise InvalidRequest("tool_choice of type tool needs a name.", "tool_choice")
    named = asked.name if asked.type == "tool" else None
    choice = ToolChoice.AUTO if asked.type == "auto" else ToolChoice.REQUIRED
    return checked(Tools(tools, choice, named, not asked.disable_parallel_tool_use))
