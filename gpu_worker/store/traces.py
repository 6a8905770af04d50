"""Trace of each running request, which its calls to the store name, and the spans of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from carrel.process.trace_context import TraceContext
from carrel.process.tracing import NoTracer, Span, Tracer
from gpu_worker.records import Usage


class Traces:
    """Traces by request. Any thread may look one up."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        """tracer: takes a span of each request; None: no spans are taken."""
        self._tracer = tracer or NoTracer()
        self._by_request: dict[str, TraceContext] = {}

    def find(self, request_id: str) -> TraceContext | None:
        return self._by_request.get(request_id)

    @contextmanager
    def running(self, request_id: str, parent: TraceContext | None) -> Iterator[Span]:
        """Yield the request's span, which ends with the block, with its error; within the block the request's calls are
        part of its trace, if it has one."""
        span, error = self._tracer.start("generate", parent, {"carrel.request_id": request_id}), ""
        if span.trace is not None:
            self._by_request[request_id] = span.trace
        try:
            yield span
        except BaseException as failure:
            error = type(failure).__name__
            raise
        finally:
            self._by_request.pop(request_id, None)
            span.end(error)


def tell_phases(span: Span, usage: Usage) -> None:
    """Add the phases of a request that has just ended to its span, by the times that its usage reports."""
    phases = (
        ("queue", usage.queue_ms),
        ("prefill", usage.prefill_ms),
        ("index wait", usage.index_wait_ms),
        ("decode", usage.decode_ms),
    )
    at = time.time() - sum(took for _, took in phases) / 1e3
    for name, took_ms in phases:
        ended = at + took_ms / 1e3
        if took_ms > 0:
            span.part(name, at, ended)
        at = ended
    span.tell(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "carrel.cached_tokens": usage.cached_tokens,
            "carrel.policy": usage.policy,
            "carrel.hit_rate": usage.hit_rate,
            "carrel.bytes_moved": usage.bytes_moved,
        }
    )
