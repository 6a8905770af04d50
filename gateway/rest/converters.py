"""Bodies to the service's records."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import InvalidRequest
from gateway.records import CarrelOptions, ChatRequest, CompletionRequest, GenerationOptions, Message
from gateway.rest.schemas import ChatBody, CompletionBody, GenerationBody, MessageBody


def read_chat(body: ChatBody, request_id: str | None, caller: bytes) -> ChatRequest:
    """Raises InvalidRequest for what this server does not do."""
    for param, value in (("tools", body.tools), ("functions", body.functions)):
        if value:
            raise InvalidRequest(f"{param} is not supported: this server calls no tools.", param)
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice is not supported: this server calls no tools.", "tool_choice")
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            "response_format is not supported except {'type': 'text'}: ask for the format in the prompt.",
            "response_format",
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
    _check_stream_options(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return ChatRequest(
        read_messages(body.messages),
        _read_options(body, max_tokens, logprobs),
        body.chat_template_kwargs or {},
        request_id,
        caller,
    )


def read_messages(messages: Sequence[MessageBody]) -> tuple[Message, ...]:
    """Text messages; parts of text are joined. Raises InvalidRequest for anything but text."""
    return tuple(_read_message(message) for message in messages)


def read_completion(body: CompletionBody, request_id: str | None, caller: bytes) -> CompletionRequest:
    """Raises InvalidRequest for what this server does not do."""
    if body.echo:
        raise InvalidRequest("echo is not supported: put the prompt before the answer yourself.", "echo")
    if body.suffix:
        raise InvalidRequest("suffix is not supported.", "suffix")
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise InvalidRequest("best_of is not supported: leave it out, or set it to n.", "best_of")
    _check_stream_options(body)
    return CompletionRequest(
        _read_prompts(body.prompt), _read_options(body, body.max_tokens, body.logprobs), request_id, caller
    )


def _read_prompts(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several; a list of numbers is one prompt of token ids."""
    if isinstance(prompt, str):
        return (prompt,)
    token_ids = tuple(each for each in prompt if isinstance(each, int))
    if token_ids:
        return (token_ids,)
    return tuple(
        tuple(each) if isinstance(each, list) else each for each in prompt if not isinstance(each, int)
    )


def _read_message(message: MessageBody) -> Message:
    if message.tool_calls:
        raise InvalidRequest("tool_calls are not supported: this server calls no tools.", "messages")
    match message.content:
        case str():
            return Message(message.role, message.content)
        case None:
            raise InvalidRequest("A message has no content.", "messages")
        case parts:
            if any(part.type != "text" or part.text is None for part in parts):
                raise InvalidRequest(
                    "Only parts of type 'text' are supported: this model reads text.", "messages"
                )
            return Message(message.role, "".join(part.text or "" for part in parts))


def _check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true.", "stream_options")


def _read_options(body: GenerationBody, max_tokens: int | None, logprobs: int | None) -> GenerationOptions:
    carrel = body.carrel
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return GenerationOptions(
        model=body.model,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        n=1 if body.n is None else body.n,
        stop=tuple(stop or ()),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
        logit_bias={int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()},
        carrel=CarrelOptions(carrel.policy, carrel.budget) if carrel else CarrelOptions(),
        session_id=body.session_id,
    )
