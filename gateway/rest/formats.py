"""Answers of chats and completions: one object, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

from starlette.responses import Response

from gateway.errors import ServiceError
from gateway.exchange import (
    ChoiceFinished,
    Completed,
    Event,
    Generation,
    Prefilling,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from gateway.heavy_work import CallerWork
from gateway.rest.answer import (
    MANY_VALUES,
    VALUE_CHARS,
    Answer,
    ChoiceText,
    Fields,
    ReplyWriter,
    num_values,
    usage_answer,
)
from gateway.rest.answers import (
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    ToolCallAnswer,
)
from gateway.rest.errors import error_body, error_response
from gateway.rest.logprobs import Offsets, chat_logprobs, completion_logprobs, prompt_logprobs
from gateway.rest.reply import frame
from gateway.rest.schemas import Body, ChatBody, CompletionBody, GenerationBody, StreamOptions


class AnswerWriter(ReplyWriter):
    """The part that chats and completions share; `_chunk`, `_piece` and `_end` are of each."""

    end = b"data: [DONE]\n\n"
    id_prefix: str

    def __init__(self, generation: Generation, body: GenerationBody, work: CallerWork) -> None:
        self._head: Fields = {
            "id": f"{self.id_prefix}-{generation.request_id}",
            "created": generation.created,
            "model": generation.model,
        }
        self._options = body.stream_options or StreamOptions()
        self._returns_ids = bool(body.return_token_ids)
        # alternatives to tell of each of the prompt's tokens; None: nothing of them
        self._num_of_prompt = body.prompt_logprobs
        self._work = work
        self._begun: set[int] = set()
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    def unfinished(self, answer: Answer, error: ServiceError) -> Response:
        """The error, with the answer as far as it came."""
        return error_response(error, self.whole(answer).model_copy(update=dict(error_body(error))))

    async def frames(self, event: Event) -> bytes:
        match event:
            case TextDelta() if (count := num_values(event)) > MANY_VALUES:
                return await self._work.answer(count * VALUE_CHARS, self._frames, event)
        return self._frames(event)

    def failed(self, error: ServiceError | None) -> bytes:
        return frame(error_body(error))

    def _frames(self, event: Event) -> bytes:
        return b"".join(map(frame, self._chunks(event)))

    def _chunks(self, event: Event) -> Iterator[Body]:
        match event:
            case TextDelta(index=index, text=text, logprobs=logprobs):
                self._num_tokens += len(event.token_ids)
                yield from self._begin(index)
                if text or logprobs or self._returns_ids:
                    yield self._chunk([self._piece(event)], self._usage())
            case ReasoningDelta(index=index) | ToolCallDelta(index=index):
                yield from self._begin(index)
                yield self._chunk([self._piece(event)], self._usage())
            case ChoiceFinished(index=index):
                yield from self._begin(index)
                yield self._chunk([self._end(event)], self._usage())
            case Completed(usage=usage) if self._options.include_usage:
                yield self._chunk([], {"usage": usage_answer(usage)})
            case Prefilling(prompt_tokens=prompt_tokens):
                self._num_prompt_tokens = prompt_tokens
                if self._options.include_progress:
                    yield self._chunk([], {**self._usage(), "carrel": {"progress": asdict(event)}})
            case Completed():
                return

    def _usage(self) -> Fields:
        """Return the usage so far where each chunk tells it, or null where the last one will."""
        if self._options.continuous_usage_stats:
            return {"usage": usage_answer(Usage(self._num_prompt_tokens, self._num_tokens, 0.0, None))}
        return {"usage": None} if self._options.include_usage else {}

    def _ids(self, part: TextDelta | ChoiceText) -> Fields:
        """Return the ids of a choice's new tokens, or of all; the prompt's where its choice begins."""
        if not self._returns_ids:
            return {}
        prompt = {"prompt_token_ids": list(part.prompt_token_ids)} if part.prompt_token_ids else {}
        return {**prompt, "token_ids": list(part.token_ids)}

    def _whole_head(self, answer: Answer) -> Fields:
        return {**self._head, "usage": None if answer.usage is None else usage_answer(answer.usage)}

    def _begin(self, index: int) -> Iterator[Body]:
        """Yield the chunk before a choice's first, once, where there is one."""
        return iter(())

    def _chunk(self, choices: Sequence[Any], more: Fields) -> Body:
        raise NotImplementedError

    def _piece(self, event: TextDelta | ReasoningDelta | ToolCallDelta) -> Body:
        raise NotImplementedError

    def _end(self, event: ChoiceFinished) -> Body:
        raise NotImplementedError


class ChatWriter(AnswerWriter):
    """A message; in a stream deltas of one, the role first."""

    id_prefix = "chatcmpl"

    def __init__(self, generation: Generation, body: ChatBody, work: CallerWork) -> None:
        super().__init__(generation, body, work)
        self._has_logprobs = bool(body.logprobs)

    def whole(self, answer: Answer) -> ChatAnswer:
        choices = [self._whole(choice) for choice in answer.choices]
        told = ChatAnswer(**self._whole_head(answer), object="chat.completion", choices=choices)
        if self._num_of_prompt is not None:
            # all choices have one prompt; set behind the model's check, in which no other thread would go on
            told.prompt_logprobs = prompt_logprobs(answer.choices[0].prompt_logprobs, self._num_of_prompt)
        return told

    def _whole(self, choice: ChoiceText) -> ChatChoice:
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
            **self._ids(choice),
        )

    def _begin(self, index: int) -> Iterator[Body]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk([_delta(index, ChatDelta(role="assistant", content=""))], self._usage())

    def _chunk(self, choices: Sequence[Any], more: Fields) -> ChatChunk:
        return ChatChunk(**self._head, **more, object="chat.completion.chunk", choices=list(choices))

    def _piece(self, event: TextDelta | ReasoningDelta | ToolCallDelta) -> ChatChunkChoice:
        match event:
            case TextDelta(index=index, text=text, logprobs=logprobs):
                scores = chat_logprobs(logprobs) if logprobs else None
                return _delta(index, ChatDelta(content=text), logprobs=scores, **self._ids(event))
            case ReasoningDelta(index=index, text=text):
                return _delta(index, ChatDelta(reasoning_content=text))
            case ToolCallDelta(index=index, place=place, id=call_id, name=name, arguments=arguments):
                if call_id:
                    call = _call(call_id, name, arguments, index=place)
                else:
                    call = ToolCallAnswer(index=place, function=CalledFunction(arguments=arguments))
                return _delta(index, ChatDelta(tool_calls=[call]))

    def _end(self, event: ChoiceFinished) -> ChatChunkChoice:
        return _delta(event.index, ChatDelta(), finish_reason=event.finish_reason)


class CompletionWriter(AnswerWriter):
    """Text, and where in it each token begins."""

    id_prefix = "cmpl"

    def __init__(self, generation: Generation, body: CompletionBody, work: CallerWork) -> None:
        super().__init__(generation, body, work)
        # alternatives to tell of each token; None: nothing of them
        self._num_logprobs = body.logprobs
        # of the stream so far, per choice
        self._offsets: dict[int, Offsets] = {}

    def whole(self, answer: Answer) -> CompletionAnswer:
        choices = [self._whole(choice) for choice in answer.choices]
        return CompletionAnswer(**self._whole_head(answer), object="text_completion", choices=choices)

    def _whole(self, choice: ChoiceText) -> CompletionChoice:
        fields: Fields = {"text": choice.text, "logprobs": None, **self._ids(choice)}
        if self._num_logprobs is not None:
            offsets = Offsets(choice.text, choice.logprobs)
            fields["logprobs"] = completion_logprobs(choice.logprobs, offsets, self._num_logprobs)
        reason = cast(Any, choice.finish_reason)
        written = CompletionChoice(index=choice.index, finish_reason=reason, **fields)
        if self._num_of_prompt is not None:
            written.prompt_logprobs = prompt_logprobs(choice.prompt_logprobs, self._num_of_prompt)
        return written

    def _chunk(self, choices: Sequence[Any], more: Fields) -> CompletionChunk:
        return CompletionChunk(**self._head, **more, object="text_completion", choices=list(choices))

    def _piece(self, event: TextDelta | ReasoningDelta | ToolCallDelta) -> CompletionChoice:
        match event:
            case TextDelta(index=index, text=text, logprobs=logprobs):
                if index not in self._offsets:
                    self._offsets[index] = Offsets(text, logprobs)
                offsets, num_top = self._offsets[index], self._num_logprobs or 0
                scores = completion_logprobs(logprobs, offsets, num_top) if logprobs else None
                ids = self._ids(event)
                return CompletionChoice(index=index, text=text, logprobs=scores, finish_reason=None, **ids)
            case _:
                raise TypeError("a completion is all text")

    def _end(self, event: ChoiceFinished) -> CompletionChoice:
        reason = cast(Any, event.finish_reason)
        return CompletionChoice(index=event.index, text="", logprobs=None, finish_reason=reason)


def _delta(index: int, delta: ChatDelta, **fields: Any) -> ChatChunkChoice:
    return ChatChunkChoice(
        **{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
    )


def _call(call_id: str, name: str, arguments: str, **place: int) -> ToolCallAnswer:
    function = CalledFunction(name=name, arguments=arguments)
    return ToolCallAnswer(id=call_id, type="function", function=function, **place)
