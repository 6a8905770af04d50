"""Bodies of chats, completions and their neighbours to the service's records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from gateway.errors import InvalidRequest
from gateway.exchange import (
    ChatRequest,
    CompletionRequest,
    GenerationOptions,
    Message,
    TokenIds,
    Tool,
    ToolCall,
    Tools,
)
from gateway.grammars import format_grammars, grammars_of, only_one, structured
from gateway.rest.options import read_options, session_of
from gateway.rest.schemas import (
    AllowedChoice,
    ChatBody,
    CompletionBody,
    FunctionBody,
    GenerationBody,
    MessageBody,
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    TextPart,
    TokenizeBody,
)
from gateway.rest.unsupported import refuse_unsupported
from gateway.tool_calls.checks import offered
from gpu_worker.v1 import gpu_worker_pb2 as pb


def read_tools(body: ChatBody) -> Tools | None:
    """None where nothing may be called: then the model is told of no tools. Raises InvalidRequest."""
    if body.functions:
        raise InvalidRequest("functions are not supported: give them as tools.", "functions")
    tools = tuple(_read_tool(tool.function) for tool in body.tools or ())
    is_parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case NamedTool(function=function):
            return offered(tools, named=function.name, is_parallel=is_parallel)
        case AllowedChoice(allowed_tools=allowed):
            names = {tool.function.name for tool in allowed.tools}
            return offered(tools, allowed.mode, allowed=names, is_parallel=is_parallel)
        case word:
            return offered(tools, word or "auto", is_parallel=is_parallel)


def read_calls(message: MessageBody) -> tuple[ToolCall, ...]:
    """An assistant's."""
    return tuple(
        ToolCall(call.id, call.function.name, call.function.arguments or "{}")
        for call in message.tool_calls or ()
    )


def _read_tool(function: FunctionBody) -> Tool:
    parameters = {"type": "object"} if function.parameters is None else function.parameters
    return Tool(function.name, function.description, parameters, bool(function.strict))


def read_grammar(body: GenerationBody) -> pb.Grammar | None:
    """None where the answer may be anything. Raises InvalidRequest for a field that says nothing, and for two."""
    asked = body.response_format or ResponseFormat(type="text")
    schema = None if asked.json_schema is None else asked.json_schema.json_schema
    return only_one(
        [
            *format_grammars(asked.type, schema, "response_format", "json_schema.schema"),
            *_of_structured_outputs(body.structured_outputs),
            *grammars_of(
                "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
            ),
        ]
    )


def _of_structured_outputs(asked: StructuredOutputs | None) -> list[pb.Grammar]:
    if asked is None:
        return []
    param = "structured_outputs"
    if unknown := next((name for name, value in (asked.model_extra or {}).items() if value), None):
        raise InvalidRequest(f"{param}.{unknown[:50]} is not supported: leave it out.", param)
    return structured(asked.as_json, bool(asked.json_object), asked.regex, asked.choice, asked.grammar)


def read_chat(body: ChatBody, request_id: str | None, caller: bytes) -> ChatRequest:
    """Raises InvalidRequest for what this server does not do."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
    _check_fields(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return ChatRequest(
        read_messages(body.messages),
        _read_options(body, _max_tokens(body), logprobs, caller),
        body.chat_template_kwargs or {},
        request_id,
        *_read_end(body),
        read_tools(body),
        tells_reasoning=True,
        hides_reasoning=body.include_reasoning is False,
        reasoning_effort=body.reasoning_effort,
    )


def read_tokenize_chat(body: TokenizeBody) -> ChatRequest:
    """Raises InvalidRequest."""
    options = GenerationOptions(body.model, add_special_tokens=body.add_special_tokens)
    adds_prompt, continues = _read_end(body)
    return ChatRequest(
        read_messages(body.messages or []),
        options,
        adds_generation_prompt=adds_prompt,
        continues_final=continues,
    )


def _max_tokens(body: GenerationBody) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _read_end(body: ChatBody | TokenizeBody) -> tuple[bool, bool]:
    """Return whether the prompt ends with the start of an answer, and whether it ends within its last message."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other: set one.",
            "continue_final_message",
        )
    return not continues and body.add_generation_prompt is not False, continues


def read_messages(messages: Sequence[MessageBody]) -> tuple[Message, ...]:
    """Text messages; parts of text are joined. Raises InvalidRequest for anything but text."""
    return tuple(_read_message(message) for message in messages)


def read_completion(body: CompletionBody, request_id: str | None, caller: bytes) -> CompletionRequest:
    """Raises InvalidRequest for what this server does not do."""
    max_tokens = _max_tokens(body)
    if max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0: without echo there is nothing to answer.", "max_tokens")
    if body.suffix:
        raise InvalidRequest("suffix is not supported.", "suffix")
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise InvalidRequest("best_of is not supported: leave it out, or set it to n.", "best_of")
    _check_fields(body)
    only_echoes = max_tokens == 0
    # the worker makes one at least
    options = _read_options(body, 1 if only_echoes else max_tokens, body.logprobs, caller)
    if body.echo and body.logprobs is not None:
        # the worker tells as many as either wants
        options.draft.sampling.prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
    return CompletionRequest(_read_prompts(body.prompt), options, request_id, bool(body.echo), only_echoes)


def _read_prompts(prompt: str | Sequence[int | str | TokenIds]) -> tuple[str | TokenIds, ...]:
    """One prompt or several; a list of numbers is one prompt of token ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if prompt and isinstance(prompt[0], int):
        return (cast(TokenIds, prompt),)
    return tuple(each for each in prompt if not isinstance(each, int))


def _read_message(message: MessageBody) -> Message:
    calls = read_calls(message)
    match message.content:
        case str():
            content = message.content
        case None if calls:
            content = ""
        case None:
            raise InvalidRequest(
                f"A message of the role {message.role[:64]!r} has no content: give a text.", "messages"
            )
        case parts:
            content = "".join(_read_part(part) for part in parts)
    return Message(
        message.role,
        content,
        calls,
        message.tool_call_id,
        message.name,
        message.reasoning_content or message.reasoning,
    )


def _read_part(part: TextPart) -> str:
    if part.type != "text":
        raise InvalidRequest(
            f"A part of type {part.type[:64]!r} is not supported: this model reads parts of type 'text'.",
            "messages",
        )
    if part.text is None:
        raise InvalidRequest("A part of type 'text' has no text.", "messages")
    return part.text


def _check_fields(body: GenerationBody) -> None:
    refuse_unsupported(body)
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs are told in no stream: leave stream out.", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true.", "stream_options")


def _read_options(
    body: GenerationBody, max_tokens: int | None, logprobs: int | None, caller: bytes
) -> GenerationOptions:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return read_options(
        body,
        caller,
        session_of(body.session_id, body.prompt_cache_key),
        {"max_tokens": max_tokens, "logprobs": logprobs},
        read_grammar(body),
        n=1 if body.n is None else body.n,
        stop=tuple(stop or ()),
        add_special_tokens=body.add_special_tokens,
        truncate_to=body.truncate_prompt_tokens,
        timeout_s=body.timeout_seconds,
        keeps_stop=bool(body.include_stop_str_in_output),
        shows_special=body.skip_special_tokens is False,
    )
