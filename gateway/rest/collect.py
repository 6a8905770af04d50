"""A whole answer from a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from gateway.records import (
    ChoiceFinished,
    Completed,
    Event,
    FinishReason,
    Prefilling,
    TextDelta,
    TokenLogprob,
    Usage,
)


@dataclass
class ChoiceText:
    """One choice, filled as its events come."""

    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.STOP

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class Answer:
    choices: list[ChoiceText]
    usage: Usage


async def collect(events: AsyncGenerator[Event, None]) -> Answer:
    """Read all events and close them. Raises what the service raises."""
    # filled by the events: how many choices were asked for is only checked on the way
    choices: dict[int, ChoiceText] = {}
    usage = Usage(0, 0, 0.0, None)
    async with aclosing(events):
        async for event in events:
            match event:
                case TextDelta(index=index, text=text, logprobs=logprobs):
                    choice = choices.setdefault(index, ChoiceText(index))
                    choice.pieces.append(text)
                    choice.logprobs.extend(logprobs)
                case ChoiceFinished(index=index, finish_reason=reason):
                    choices.setdefault(index, ChoiceText(index)).finish_reason = reason
                case Completed(usage=usage):
                    pass
                case Prefilling():
                    pass
    return Answer([choices[index] for index in sorted(choices)], usage)
