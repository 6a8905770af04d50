"""An answer as it is collected from its events, and its usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import Response

from gateway.errors import RequestTimeout, ServiceError
from gateway.exchange import (
    ChoiceFinished,
    Completed,
    Event,
    Prefilling,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from gateway.rest.answers import CarrelUsage, Timings, UsageAnswer
from gateway.rest.schemas import Body

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


class ReplyWriter:
    """Writes the answer to one request, whole or as a stream, in the format of some API."""

    # after the last frame, however the stream ended
    end = b""

    def whole(self, answer: Answer) -> Body:
        """Return the body of an answer; any thread may ask."""
        raise NotImplementedError

    def unfinished(self, answer: Answer, error: ServiceError) -> Response:
        """Return the response for an answer that `error` cut off, in any thread. May raise the error."""
        raise error

    async def frames(self, event: Event) -> bytes:
        """Return no frame, one or several."""
        raise NotImplementedError

    def failed(self, error: ServiceError | None) -> bytes:
        """Return the frame for an error; None stands for a bug."""
        raise NotImplementedError


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
