"""The usage of a request from the usages of its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.choice import Choice
from gateway.records import Usage, WorkerUsage


def total_usage(choices: Sequence[Choice], num_prompt_tokens: Sequence[int], started_at: float) -> Usage:
    """Usage of all choices; each prompt counts once, however many choices it has. Choices lie prompt by prompt."""
    first_token_at = min((choice.first_token_at or started_at for choice in choices), default=started_at)
    return Usage(
        prompt_tokens=sum(num_prompt_tokens),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        ttft_ms=(first_token_at - started_at) * 1000,
        carrel=_combine(choices, len(choices) // len(num_prompt_tokens)),
    )


def _combine(choices: Sequence[Choice], num_per_prompt: int) -> WorkerUsage | None:
    usages = [choice.usage for choice in choices if choice.usage is not None]
    if not usages:
        return None
    if len(usages) == 1:
        return usages[0]
    cached = sum(
        min((choice.usage.cached_tokens for choice in group if choice.usage is not None), default=0)
        for group in (choices[at : at + num_per_prompt] for at in range(0, len(choices), num_per_prompt))
    )
    count = len(usages)
    return replace(
        usages[0],
        cached_tokens=cached,
        budget_tokens=max(usage.budget_tokens for usage in usages),
        context_tokens=max(usage.context_tokens for usage in usages),
        offloaded_tokens=sum(usage.offloaded_tokens for usage in usages),
        attended_tokens=sum(usage.attended_tokens for usage in usages) / count,
        window_tokens=sum(usage.window_tokens for usage in usages) / count,
        hit_rate=sum(usage.hit_rate for usage in usages) / count,
        bytes_moved=sum(usage.bytes_moved for usage in usages),
        queue_ms=max(usage.queue_ms for usage in usages),
        prefill_ms=max(usage.prefill_ms for usage in usages),
        index_wait_ms=max(usage.index_wait_ms for usage in usages),
        decode_ms=max(usage.decode_ms for usage in usages),
    )
