"""Answers as OpenAI writes them: one object, or the chunks of a stream, for chat and for completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from starlette.responses import Response

from gateway.errors import RequestTimeout, ServiceError
from gateway.exchange import (
    ChoiceFinished,
    Completed,
    Event,
    Generation,
    Prefilling,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from gateway.heavy_work import CallerWork
from gateway.rest.answers import CarrelUsage, Timings, UsageAnswer
from gateway.rest.errors import error_body, error_response
from gateway.rest.schemas import Body, StreamOptions
from gateway.rest.sse import frame

CARREL_FIELDS = tuple(name for name in CarrelUsage.model_fields if name != "timings")
TIMING_FIELDS = tuple(name for name in Timings.model_fields if name != "ttft_ms")
# of an answer or an event, that take longer to write than an event loop should be held up
MANY_VALUES = 4096
# about what writing one of them costs, in characters of other work
VALUE_CHARS = 8
# of a model, by their names
Fields = dict[str, Any]


@dataclass
class ChoiceText:
    """One choice, filled as its events come."""

    index: int
    pieces: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: Sequence[int] = ()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def take(self, delta: TextDelta) -> None:
        self.pieces.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.token_ids.extend(delta.token_ids)
        self.prompt_token_ids = self.prompt_token_ids or delta.prompt_token_ids

    def take_call(self, event: ToolCallDelta) -> None:
        """More of its last call, or another."""
        if event.place == len(self.calls):
            self.calls.append(ToolCall(event.id, event.name, ""))
        call = self.calls[event.place]
        self.calls[event.place] = replace(call, arguments=call.arguments + event.arguments)


@dataclass
class Answer:
    """`error`: what ended it before its end; its choices are then as far as they came, and there is no usage."""

    choices: list[ChoiceText]
    usage: Usage | None
    error: ServiceError | None = None


def num_values(part: ChoiceText | TextDelta) -> int:
    """That may be told beside its text."""
    return sum(
        map(len, (part.logprobs, part.prompt_logprobs, part.token_ids, part.prompt_token_ids)),
    )


async def collect(events: AsyncGenerator[Event, None]) -> Answer:
    """Read all events and close them. Raises what the service raises, but keeps what there is at a deadline."""
    # filled by the events: how many choices were asked for is only checked on the way
    choices: dict[int, ChoiceText] = {}
    usage: Usage | None = None
    error: ServiceError | None = None
    try:
        async with aclosing(events):
            async for event in events:
                match event:
                    case TextDelta(index=index):
                        choices.setdefault(index, ChoiceText(index)).take(event)
                    case ReasoningDelta(index=index, text=text):
                        choices.setdefault(index, ChoiceText(index)).reasoning.append(text)
                    case ToolCallDelta(index=index):
                        choices.setdefault(index, ChoiceText(index)).take_call(event)
                    case ChoiceFinished(index=index, finish_reason=reason, stop=stop):
                        choice = choices.setdefault(index, ChoiceText(index))
                        choice.finish_reason, choice.stop = reason, stop
                    case Completed():
                        usage = event.usage
                    case Prefilling():
                        pass
    except RequestTimeout as timeout:
        if not choices:
            raise
        error = timeout
    return Answer([choices[index] for index in sorted(choices)], usage, error)


Choice = TypeVar("Choice", bound=Body)


class ChoiceFormat(Protocol[Choice]):
    """How an API writes the choices of an answer; one object serves one request. ids: fields of token ids."""

    id_prefix: str

    def answer(self, head: Fields, choices: Sequence[ChoiceText], ids: Sequence[Fields]) -> Body:
        """A whole answer; `ids` are those of each choice."""

    def chunk(self, head: Fields, choices: Sequence[Choice]) -> Body:
        """A chunk of a stream."""

    def begin(self, index: int) -> Choice | None:
        """Return the choice of a chunk before the first text; None: there is none."""

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob], ids: Fields) -> Choice: ...

    def part(self, event: ReasoningDelta | ToolCallDelta) -> Choice:
        """Return the choice of a chunk for a part other than text."""

    def end(self, index: int, reason: str) -> Choice:
        """Return the choice of the chunk with the finish reason."""


class AnswerWriter(Generic[Choice]):
    """A `ReplyWriter` of one request. returns_ids: tokens are told by their ids too."""

    def __init__(
        self,
        generation: Generation,
        choice_format: ChoiceFormat[Choice],
        options: StreamOptions,
        work: CallerWork,
        returns_ids: bool = False,
    ) -> None:
        self._head: Fields = {
            "id": f"{choice_format.id_prefix}-{generation.request_id}",
            "created": generation.created,
            "model": generation.model,
        }
        self._format = choice_format
        self._options = options
        self._work = work
        self._returns_ids = returns_ids
        self._begun: set[int] = set()
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    end = b"data: [DONE]\n\n"

    def whole(self, answer: Answer) -> Body:
        usage = None if answer.usage is None else usage_answer(answer.usage)
        ids = [self._ids(choice) for choice in answer.choices]
        return self._format.answer({**self._head, "usage": usage}, answer.choices, ids)

    def unfinished(self, answer: Answer, error: ServiceError) -> Response:
        """The error, with the answer as far as it came."""
        return error_response(error, self.whole(answer).model_copy(update=dict(error_body(error))))

    async def frames(self, event: Event) -> bytes:
        match event:
            case TextDelta() if (count := num_values(event)) > MANY_VALUES:
                return await self._work.answer(count * VALUE_CHARS, self._frames, event)
        return self._frames(event)

    def _frames(self, event: Event) -> bytes:
        return b"".join(map(frame, self.chunks(event)))

    def failed(self, error: ServiceError | None) -> bytes:
        return frame(error_body(error))

    def chunks(self, event: Event) -> Iterator[Body]:
        """The chunks that an event of the request becomes."""
        match event:
            case TextDelta(index=index, text=text, logprobs=logprobs):
                self._num_tokens += len(event.token_ids)
                yield from self._begin(index)
                if text or logprobs or self._returns_ids:
                    yield self._chunk([self._format.piece(index, text, logprobs, self._ids(event))])
            case ReasoningDelta(index=index) | ToolCallDelta(index=index):
                yield from self._begin(index)
                yield self._chunk([self._format.part(event)])
            case ChoiceFinished(index=index, finish_reason=reason):
                yield from self._begin(index)
                yield self._chunk([self._format.end(index, reason)])
            case Completed(usage=usage) if self._options.include_usage:
                yield self._chunk([], usage=usage_answer(usage))
            case Prefilling(prompt_tokens=prompt_tokens):
                self._num_prompt_tokens = prompt_tokens
                if self._options.include_progress:
                    yield self._chunk([], carrel={"progress": asdict(event)})
            case Completed():
                pass

    def _ids(self, part: TextDelta | ChoiceText) -> Fields:
        """Return the ids of a choice's new tokens, or of all; the prompt's where its choice begins."""
        if not self._returns_ids:
            return {}
        prompt = {"prompt_token_ids": list(part.prompt_token_ids)} if part.prompt_token_ids else {}
        return {**prompt, "token_ids": list(part.token_ids)}

    def _begin(self, index: int) -> Iterator[Body]:
        if index not in self._begun:
            self._begun.add(index)
            if (choice := self._format.begin(index)) is not None:
                yield self._chunk([choice])

    def _chunk(self, choices: list[Choice], **more: Any) -> Body:
        usage: Fields = {"usage": None} if self._options.include_usage else {}
        if self._options.continuous_usage_stats:
            so_far = Usage(self._num_prompt_tokens, self._num_tokens, 0.0, None)
            usage = {"usage": usage_answer(so_far)}
        return self._format.chunk({**self._head, **usage, **more}, choices)


def usage_answer(usage: Usage) -> UsageAnswer:
    """OpenAI's `usage`, with ours under `carrel`, which is left out when the worker's account is missing."""
    reply: Fields = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.worker is not None:
        timings = {name: round(getattr(usage.worker, name), 3) for name in TIMING_FIELDS}
        reply["carrel"] = {
            **{name: getattr(usage.worker, name) for name in CARREL_FIELDS},
            "timings": {"ttft_ms": round(usage.ttft_ms, 3), **timings},
        }
    return UsageAnswer(**reply)
