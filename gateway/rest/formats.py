"""A choice as chat writes it, and as completion does."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, cast

from gateway.exchange import ReasoningDelta, TokenLogprob, ToolCallDelta
from gateway.rest.answer import ChoiceText, Fields
from gateway.rest.answers import (
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatToken,
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    PromptToken,
    ToolCallAnswer,
    TopToken,
)


class ChatFormat:
    """A message; in a stream deltas of one, the role first."""

    id_prefix = "chatcmpl"

    def __init__(self, has_logprobs: bool, num_of_prompt: int | None) -> None:
        """num_of_prompt: alternatives to tell of each of the prompt's tokens; None: nothing of them."""
        self._has_logprobs = has_logprobs
        self._num_of_prompt = num_of_prompt

    def answer(self, head: Fields, choices: Sequence[ChoiceText], ids: Sequence[Fields]) -> ChatAnswer:
        written = [self._whole(choice, of_choice) for choice, of_choice in zip(choices, ids, strict=True)]
        answer = ChatAnswer(**head, object="chat.completion", choices=written)
        if self._num_of_prompt is not None:
            # all choices have one prompt; set behind the model's check, in which no other thread would go on
            answer.prompt_logprobs = _prompt_logprobs(choices[0].prompt_logprobs, self._num_of_prompt)
        return answer

    def chunk(self, head: Fields, choices: Sequence[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(**head, object="chat.completion.chunk", choices=list(choices))

    def begin(self, index: int) -> ChatChunkChoice:
        return _delta(index, ChatDelta(role="assistant", content=""))

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob], ids: Fields) -> ChatChunkChoice:
        scores = chat_logprobs(logprobs) if logprobs else None
        return ChatChunkChoice(
            index=index, delta=ChatDelta(content=text), logprobs=scores, finish_reason=None, **ids
        )

    def part(self, event: ReasoningDelta | ToolCallDelta) -> ChatChunkChoice:
        match event:
            case ReasoningDelta(index=index, text=text):
                return _delta(index, ChatDelta(reasoning_content=text))
            case ToolCallDelta(index=index, place=place, id=call_id, name=name, arguments=arguments):
                if call_id:
                    call = _call(call_id, name, arguments, index=place)
                else:
                    call = ToolCallAnswer(index=place, function=CalledFunction(arguments=arguments))
                return _delta(index, ChatDelta(tool_calls=[call]))

    def end(self, index: int, reason: str) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=None, finish_reason=cast(Any, reason))

    def _whole(self, choice: ChoiceText, ids: Fields) -> ChatChoice:
        message: Fields = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in choice.calls]
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(**message),
            logprobs=chat_logprobs(choice.logprobs) if self._has_logprobs else None,
            finish_reason=cast(Any, choice.finish_reason),
            **ids,
        )


class CompletionFormat:
    """Text, and where in it each token begins."""

    id_prefix = "cmpl"

    def __init__(self, num_logprobs: int | None, num_of_prompt: int | None) -> None:
        """Alternatives to tell of each token, and of each of the prompt's; None: nothing of them."""
        self._num_logprobs = num_logprobs
        self._num_of_prompt = num_of_prompt
        # of the stream so far, per choice
        self._offsets: dict[int, _Offsets] = {}

    def answer(self, head: Fields, choices: Sequence[ChoiceText], ids: Sequence[Fields]) -> CompletionAnswer:
        written = [self._whole(choice, of_choice) for choice, of_choice in zip(choices, ids, strict=True)]
        return CompletionAnswer(**head, object="text_completion", choices=written)

    def chunk(self, head: Fields, choices: Sequence[CompletionChoice]) -> CompletionChunk:
        return CompletionChunk(**head, object="text_completion", choices=list(choices))

    def begin(self, index: int) -> None:
        return None

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob], ids: Fields) -> CompletionChoice:
        if index not in self._offsets:
            self._offsets[index] = _Offsets(text, logprobs)
        offsets = self._offsets[index]
        scores = _completion_logprobs(logprobs, offsets, self._num_logprobs or 0) if logprobs else None
        return CompletionChoice(index=index, text=text, logprobs=scores, finish_reason=None, **ids)

    def part(self, event: ReasoningDelta | ToolCallDelta) -> CompletionChoice:
        raise TypeError("a completion is all text")

    def end(self, index: int, reason: str) -> CompletionChoice:
        return CompletionChoice(index=index, text="", logprobs=None, finish_reason=cast(Any, reason))

    def _whole(self, choice: ChoiceText, ids: Fields) -> CompletionChoice:
        fields: Fields = {"text": choice.text, "logprobs": None, **ids}
        if self._num_logprobs is not None:
            offsets = _Offsets(choice.text, choice.logprobs)
            fields["logprobs"] = _completion_logprobs(choice.logprobs, offsets, self._num_logprobs)
        reason = cast(Any, choice.finish_reason)
        written = CompletionChoice(index=choice.index, finish_reason=reason, **fields)
        if self._num_of_prompt is not None:
            written.prompt_logprobs = _prompt_logprobs(choice.prompt_logprobs, self._num_of_prompt)
        return written


def _delta(index: int, delta: ChatDelta) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)


def _call(call_id: str, name: str, arguments: str, **place: int) -> ToolCallAnswer:
    function = CalledFunction(name=name, arguments=arguments)
    return ToolCallAnswer(id=call_id, type="function", function=function, **place)


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    """With the best alternatives to each, and its bytes."""
    content = [
        ChatToken(
            **_chat_logprob(token), top_logprobs=[TopToken(**_chat_logprob(each)) for each in token.top]
        )
        for token in tokens
    ]
    return ChatLogprobs(content=content, refusal=None)


def _chat_logprob(token: TokenLogprob) -> Fields:
    return {"token": token.token, "logprob": json_float(token.logprob), "bytes": list(token.bytes)}


def _prompt_logprobs(tokens: Sequence[TokenLogprob], num_top: int) -> list[dict[str, PromptToken] | None]:
    """As vLLM has them: by their ids each token and the best alternatives to it; of the first nothing."""
    return [
        None,
        *(
            {str(token.token_id): _ranked(token, token.rank)}
            | {str(each.token_id): _ranked(each, rank) for rank, each in enumerate(token.top[:num_top], 1)}
            for token in tokens
        ),
    ]


def _ranked(token: TokenLogprob, rank: int | None) -> PromptToken:
    return PromptToken(logprob=json_float(token.logprob), rank=rank, decoded_token=token.token)


def json_float(value: float | None) -> Any:
    """JSON has no infinity; OpenAI writes -9999 for an impossible token. None stays None."""
    return None if value is None else max(value, -9999.0)


class _Offsets:
    """Where in a choice's text its tokens begin; of one that begins within a character, where that does."""

    def __init__(self, text: str, first: Sequence[TokenLogprob]) -> None:
        """text: its beginning. first: its first tokens."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        # an echoed prompt's begin token, which its text leaves out, lies before it
        if first and first[0].logprob is None and not _begins(text, first[0].bytes):
            self._num_chars = -len(first[0].token)

    def take(self, token: TokenLogprob) -> int:
        """Return the offset of the next token."""
        offset = max(self._num_chars, 0)
        self._num_chars += len(self._decoder.decode(token.bytes))
        return offset


def _begins(text: str, beginning: bytes) -> bool:
    # a character has a byte at least
    return text[: len(beginning)].encode().startswith(beginning)


def _completion_logprobs(
    tokens: Sequence[TokenLogprob], offsets: _Offsets, num_top: int
) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[token.token for token in tokens],
        token_logprobs=[json_float(token.logprob) for token in tokens],
        # the token itself is there even where it is none of the best; a prompt's first is likely after nothing
        top_logprobs=[
            None
            if token.logprob is None
            else {each.token: json_float(each.logprob) for each in (*token.top[:num_top], token)}
            for token in tokens
        ],
        text_offset=[offsets.take(token) for token in tokens],
    )
