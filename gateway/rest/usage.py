"""The cost of a request as OpenAI's `usage`, with ours under `usage.carrel`."""

from __future__ import annotations

from typing import Any

from gateway.records import Usage

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


def usage_json(usage: Usage) -> dict[str, Any]:
    """`carrel` is left out when the worker's account is missing."""
    reply: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.carrel is not None:
        timings = {name: round(getattr(usage.carrel, name), 3) for name in TIMING_FIELDS}
        reply["carrel"] = {
            **{name: getattr(usage.carrel, name) for name in CARREL_FIELDS},
            "timings": {"ttft_ms": round(usage.ttft_ms, 3), **timings},
        }
    return reply
