"""Messages to the service's records, and back."""

from __future__ import annotations

import re
from dataclasses import asdict

from google.protobuf.struct_pb2 import Struct

from gateway.errors import InvalidRequest
from gateway.exchange import (
    ChatRequest,
    ChoiceFinished,
    Completed,
    Event,
    GenerationOptions,
    Message,
    Prefilling,
    ReasoningDelta,
    Scalar,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    Tools,
    Usage,
)
from gateway.grammars import json_grammar, only_one, structured
from gateway.json_limits import MAX_NESTED, check_count, check_json, read_json
from gateway.tool_calls.checks import FUNCTION_NAME, MAX_TOOLS, offered
from gateway.v1 import chat_pb2 as pb
from gpu_worker.v1 import gpu_worker_pb2


def read_tools(message: pb.ChatRequest) -> Tools | None:
    """None where nothing may be called: then the model is told of no tools. Raises InvalidRequest."""
    if len(message.tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(message.tools)} tools: give at most {MAX_TOOLS}.", "tools")
    check_json("".join(tool.parameters for tool in message.tools).encode())
    tools = tuple(_read_tool(tool) for tool in message.tools)
    is_parallel = message.parallel_tool_calls or not message.HasField("parallel_tool_calls")
    if message.tool_name:
        return offered(tools, named=message.tool_name, is_parallel=is_parallel)
    if message.tool_choice not in CHOICES:
        raise InvalidRequest(
            f"tool_choice has no value {message.tool_choice}: see chat.proto.", "tool_choice"
        )
    return offered(tools, CHOICES[message.tool_choice], is_parallel=is_parallel)


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


def read_grammar(message: pb.ChatRequest) -> gpu_worker_pb2.Grammar | None:
    """None where the answer may be anything. Raises InvalidRequest for a field that says nothing, and for two."""
    found = [json_grammar(message.json_schema, "json_schema")] if message.json_schema else []
    if message.HasField("structured_outputs"):
        found += _of_structured_outputs(message.structured_outputs)
    return only_one(found)


def _of_structured_outputs(asked: pb.StructuredOutputs) -> list[gpu_worker_pb2.Grammar]:
    kind = asked.WhichOneof("kind")
    return structured(
        asked.json if kind == "json" else None,
        asked.json_object,
        asked.regex if kind == "regex" else None,
        asked.choice.texts if kind == "choice" else None,
        asked.grammar if kind == "grammar" else None,
    )


CHOICES = {
    pb.TOOL_CHOICE_UNSPECIFIED: "auto",
    pb.TOOL_CHOICE_AUTO: "auto",
    pb.TOOL_CHOICE_NONE: "none",
    pb.TOOL_CHOICE_REQUIRED: "required",
}
CARREL_FIELDS = tuple(field.name for field in pb.CarrelUsage.DESCRIPTOR.fields)
SAMPLING_FIELDS = frozenset(field.name for field in gpu_worker_pb2.SamplingParams.DESCRIPTOR.fields)


def read_chat(message: pb.ChatRequest, caller: bytes) -> ChatRequest:
    """The message's sampling fields are the worker's, by the same names. Raises TooLarge, and InvalidRequest for what
    cannot be done."""
    _check_counts(message)
    present = {field.name: value for field, value in message.ListFields()}
    draft = gpu_worker_pb2.GenerateRequest(
        sampling=gpu_worker_pb2.SamplingParams(
            **{name: present[name] for name in SAMPLING_FIELDS & present.keys()}
        ),
        policy=message.carrel.policy,
        session_id=message.session_id,
        priority=message.priority,
        prefix_salt=caller,
        cache_salt=message.cache_salt,
        policy_options=message.carrel.options,
        grammar=read_grammar(message),
    )
    match message.carrel.WhichOneof("budget"):
        case "budget_share":
            draft.budget.share = message.carrel.budget_share
        case "budget_tokens":
            draft.budget.tokens = message.carrel.budget_tokens
    continues = message.continue_final_message
    options = GenerationOptions(
        model=message.model or None,
        n=message.n if message.HasField("n") else 1,
        stop=tuple(message.stop),
        add_special_tokens=message.add_special_tokens,
        truncate_to=message.truncate_prompt_tokens or None,
        keeps_stop=message.include_stop_str_in_output,
        shows_special=message.HasField("skip_special_tokens") and not message.skip_special_tokens,
        draft=draft,
    )
    return ChatRequest(
        tuple(_read_message(each) for each in message.messages),
        options,
        _read_template_arguments(message.chat_template_kwargs),
        message.request_id or None,
        not (continues or message.no_generation_prompt),
        continues,
        read_tools(message),
        tells_reasoning=True,
    )


def _check_counts(message: pb.ChatRequest) -> None:
    """Raises TooLarge for what would be long in reading."""
    check_count(len(message.messages), "messages", MAX_NESTED)
    num_calls = sum(len(each.tool_calls) for each in message.messages)
    check_count(len(message.messages) + num_calls, "messages and calls", MAX_NESTED)
    check_count(len(message.stop_token_ids), "stop_token_ids", MAX_NESTED)


def _read_message(message: pb.Message) -> Message:
    return Message(
        message.role,
        message.content,
        read_calls(message),
        message.tool_call_id or None,
        message.name or None,
        message.reasoning_content or None,
    )


def _read_template_arguments(given: Struct) -> dict[str, Scalar]:
    """Raises InvalidRequest for lists and objects."""
    found: dict[str, Scalar] = {}
    for name, value in given.fields.items():
        match value.WhichOneof("kind"):
            case "string_value":
                found[name] = value.string_value
            case "bool_value":
                found[name] = value.bool_value
            case "number_value":
                number = value.number_value
                # it has no whole numbers of its own
                found[name] = int(number) if number.is_integer() else number
            case "null_value" | None:
                found[name] = None
            case _:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name[:50]} must be a text, a number, a truth value or null.",
                    "chat_template_kwargs",
                )
    return found


class ChatEvents:
    """One request's events as messages: progress if it is asked for, deltas, then one Complete."""

    def __init__(self, request_id: str, include_progress: bool) -> None:
        self._request_id = request_id
        self._include_progress = include_progress
        self._finish_reasons: dict[int, str] = {}

    def message(self, event: Event) -> pb.ChatEvent | None:
        """None for an event that has no message of its own."""
        match event:
            case TextDelta(index=index, text=text, logprobs=logprobs) if text or logprobs:
                delta = pb.Delta(content=text, index=index, logprobs=map(_logprob, logprobs))
                return pb.ChatEvent(request_id=self._request_id, delta=delta)
            case ReasoningDelta(index=index, text=text):
                return pb.ChatEvent(
                    request_id=self._request_id, delta=pb.Delta(index=index, reasoning_content=text)
                )
            case ToolCallDelta(index=index, place=place, id=call_id, name=name, arguments=arguments):
                call = pb.ToolCallDelta(place=place, id=call_id, name=name, arguments=arguments)
                return pb.ChatEvent(request_id=self._request_id, delta=pb.Delta(index=index, tool_call=call))
            case ChoiceFinished(index=index, finish_reason=reason):
                self._finish_reasons[index] = reason
                return None
            case Completed(usage=usage):
                reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
                complete = pb.Complete(finish_reason=reasons[0], usage=_usage(usage), finish_reasons=reasons)
                return pb.ChatEvent(request_id=self._request_id, complete=complete)
            case Prefilling() if self._include_progress:
                return pb.ChatEvent(request_id=self._request_id, progress=pb.Progress(**asdict(event)))
            case TextDelta() | Prefilling():
                return None

    def error(self, error: pb.Error) -> pb.ChatEvent:
        return pb.ChatEvent(request_id=self._request_id, error=error)


def _logprob(token: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token=token.token, bytes=token.bytes, logprob=token.logprob, top=map(_logprob, token.top)
    )


def _usage(usage: Usage) -> pb.Usage:
    message = pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
    if usage.worker is not None:
        message.carrel.CopyFrom(
            pb.CarrelUsage(**{name: getattr(usage.worker, name) for name in CARREL_FIELDS})
        )
    return message
