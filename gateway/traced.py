"""A request as a span: within the trace that its client sent, or of one of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from carrel.process.request_context import RequestContext, current_request, working_for
from carrel.process.tracing import Tracer
from gateway.exchange import Completed, Event
from gateway.plan import Plan


async def traced(
    tracer: Tracer, plan: Plan, model: str, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[Event, None]:
    """The request's events, which are closed with this; what brings them, and what is logged meanwhile, is part of the
    span. To be iterated and closed by one task."""
    request = current_request()
    span = tracer.start(
        plan.endpoint,
        None if request is None else request.trace,
        {
            "carrel.request_id": plan.request_id,
            "gen_ai.operation.name": plan.endpoint,
            "gen_ai.request.model": model,
            "carrel.choices": plan.num_choices,
        },
    )
    # what a reader that leaves is, too
    error = "cancelled"
    try:
        with working_for(RequestContext(plan.request_id, span.trace)):
            async with aclosing(events):
                async for event in events:
                    match event:
                        case Completed(usage):
                            span.tell(
                                {
                                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                                    "carrel.ttft_ms": usage.ttft_ms,
                                }
                            )
                    yield event
        error = ""
    except Exception as failure:
        error = type(failure).__name__
        raise
    finally:
        span.end(error)
