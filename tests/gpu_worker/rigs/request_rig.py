"""Requests as the engine has them, without a model or a device."""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker.engine.request import Clock, Request
from gpu_worker.records import Budget, Event, GenerationRequest, SamplingParams
from gpu_worker.records.plans import Entered


def make_request(
    name: str,
    num_prompt: int = 100,
    max_tokens: int = 1,
    *,
    arrival: float = 0.0,
    caller: bytes = b"",
    weight: float = 1.0,
    priority: int = 0,
    policy: str = "full",
    sink: Callable[[Event], None] = lambda event: None,
) -> Request:
    """A waiting request. arrival: in seconds of its clock."""
    asked = GenerationRequest(
        name,
        (0,) * num_prompt,
        SamplingParams(max_tokens),
        policy,
        Budget(share=1.0),
        prefix_salt=caller,
        weight=weight,
        priority=priority,
    )
    entered = Entered(num_prompt, num_prompt + max_tokens, is_open_ended=False)
    return Request(asked, sink, entered, num_prompt, clock=Clock(submitted=arrival))
