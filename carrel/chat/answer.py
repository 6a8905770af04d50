"""One answer as it streams in, and the line about what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.filesize import decimal

from carrel.chat.conversation import Delta, Usage


@dataclass(frozen=True)
class Answer:
    """`usage` is None when the server sent none or the answer was stopped; `ttft_ms` where no text came."""

    text: str
    usage: Usage | None
    ttft_ms: float | None
    seconds: float
    was_stopped: bool

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens after the first over the time after the first; 0 when there is no more than one."""
        if self.usage is None or self.usage.completion_tokens < 2 or self.ttft_ms is None:
            return 0.0
        decode_s = self.seconds - self.ttft_ms / 1000
        if decode_s <= 0:
            return 0.0
        return (self.usage.completion_tokens - 1) / decode_s


def take_answer(events: Iterator[Delta | Usage], write: Callable[[str], None]) -> Answer:
    """Write each piece as it comes. Ctrl-C stops the answer; closing `events` is left to the caller."""
    started = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    usage: Usage | None = None
    was_stopped = False
    try:
        for event in events:
            match event:
                case Delta(text):
                    first = time.monotonic() if first is None else first
                    pieces.append(text)
                    write(text)
                case Usage():
                    usage = event
    except KeyboardInterrupt:
        was_stopped = True
    ended = time.monotonic()
    ttft_ms = None if first is None else (first - started) * 1000
    return Answer("".join(pieces), usage, ttft_ms, ended - started, was_stopped)


def cost_line(answer: Answer) -> str:
    """ "3,072 of 30,720 tokens attended (10 %, pqcache) · ..." """
    parts = ["stopped"] if answer.was_stopped else []
    usage = answer.usage
    if usage is not None and usage.policy:
        parts += [
            _attended(usage),
            f"{usage.offloaded_tokens:,} offloaded",
            f"{decimal(usage.bytes_moved)} moved",
            f"hit rate {usage.hit_rate:.0%}",
        ]
        if usage.cached_tokens:
            parts.append(f"{usage.cached_tokens:,} reused")
    elif usage is not None:
        parts.append(f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens")
    if answer.ttft_ms is not None:
        parts.append(f"TTFT {answer.ttft_ms:,.0f} ms")
    if answer.output_tokens_per_s:
        parts.append(f"{answer.output_tokens_per_s:,.1f} tok/s")
    return " · ".join(parts)


def _attended(usage: Usage) -> str:
    context = usage.context_tokens or usage.prompt_tokens + usage.completion_tokens
    # The mean over the steps, in which the context grows by one token each. One token is left for rounding.
    mean_context = context - usage.completion_tokens / 2
    if usage.attended_tokens >= mean_context - 1:
        return f"{context:,} tokens, all attended ({usage.policy})"
    share = usage.attended_tokens / context if context else 0.0
    return f"{usage.attended_tokens:,.0f} of {context:,} tokens attended ({share:.0%}, {usage.policy})"
