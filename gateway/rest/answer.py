"""What the answers of chat and completion have in common: the events of a whole one, and its usage as JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gateway.records import ChoiceFinished, Completed, Event, Prefilling, TextDelta, TokenLogprob, Usage

CARREL_FIELDS = (
    "policy",
    "budget_tokens",
    "context_tokens",
    "cached_tokens",
    "offloaded_tokens",
    "attended_tokens",
    "window_tokens",
    "hit_rate",
    "bytes_moved",
)
TIMING_FIELDS = ("queue_ms", "prefill_ms", "index_wait_ms", "decode_ms")


@dataclass
class ChoiceText:
    """One choice, filled as its events come."""

    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""

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


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`, with ours under `carrel`, which is left out when the worker's account is missing."""
    reply: dict[str, Any] = {
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
    return reply


def json_float(value: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for an impossible token."""
    return max(value, -9999.0)
