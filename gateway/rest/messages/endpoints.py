"""`/v1/messages`: a chat in Anthropic's words."""

from __future__ import annotations

from fastapi import Request, Response

from gateway.dialect import THINKING
from gateway.errors import InvalidRequest
from gateway.exchange import ChatRequest, GenerationOptions, Scalar, Tool, Tools
from gateway.grammars import json_grammar
from gateway.rest.bounded import ERRORS, KEY, AnswerRoute, BoundedRouter, Caller, RequestId, Service, streamed
from gateway.rest.messages.schemas import EVENTS, CountAnswer, CountBody, MessageAnswer, MessagesBody
from gateway.rest.messages.turns import read_turns
from gateway.rest.messages.writer import MessageWriter
from gateway.rest.options import read_options
from gateway.rest.reply import reply
from gateway.rest.unsupported import refuse_unsupported
from gateway.tool_calls.checks import offered

# Anthropic's words for the choice of a tool
CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
SWITCHED = {"enabled": True, "disabled": False}

answers = BoundedRouter(AnswerRoute, dependencies=KEY, responses=ERRORS)
router = BoundedRouter(dependencies=KEY, responses=ERRORS)


@answers.post("/v1/messages", response_model=MessageAnswer, responses=streamed(*EVENTS))
async def create_message(
    request: Request, body: MessagesBody, caller: Caller, request_id: RequestId, service: Service
) -> Response:
    """Continue a chat in Anthropic's words; with `stream` as its server-sent events."""
    with service.metrics.counting_refusals():
        asked = body.output_config.format if body.output_config is not None else None
        grammar = None if asked is None else json_grammar(asked.json_schema, "output_config.format")
        options = read_options(
            body,
            caller,
            body.session_id,
            grammar=grammar,
            stop=tuple(body.stop_sequences or ()),
            timeout_s=body.timeout_seconds,
        )
        generation = service.chat(read_prompt(body, options, request_id))
    return await reply(request, generation, MessageWriter(generation), bool(body.stream))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, caller: Caller, service: Service) -> CountAnswer:
    """How many tokens a prompt of `/v1/messages` has."""
    service.check_model(body.model)
    prompt = read_prompt(body, GenerationOptions(body.model))
    return CountAnswer(input_tokens=len(await service.tokenize_chat(prompt, caller)))


def read_prompt(body: CountBody, options: GenerationOptions, request_id: str | None = None) -> ChatRequest:
    """The request of a body; it continues a last turn of the assistant. Raises InvalidRequest."""
    refuse_unsupported(body)
    continues = bool(body.messages) and body.messages[-1].role == "assistant"
    return ChatRequest(
        read_turns(body),
        options,
        _read_switch(body),
        request_id,
        adds_generation_prompt=not continues,
        continues_final=continues,
        tools=_read_tools(body),
        tells_reasoning=True,
    )


def _read_switch(body: CountBody) -> dict[str, Scalar]:
    """The chat template's argument that turns thinking on or off; a template without one ignores it."""
    asked = None if body.thinking is None else SWITCHED.get(body.thinking.type)
    return {} if asked is None else {THINKING: asked}


def _read_tools(body: CountBody) -> Tools | None:
    tools = tuple(
        Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict)) for tool in body.tools or ()
    )
    if (asked := body.tool_choice) is None:
        return offered(tools)
    if asked.type == "tool" and asked.name is None:
        raise InvalidRequest("tool_choice of type tool needs a name.", "tool_choice")
    named = asked.name if asked.type == "tool" else None
    is_parallel = not asked.disable_parallel_tool_use
    return offered(tools, CHOICES[asked.type], named, is_parallel=is_parallel)
