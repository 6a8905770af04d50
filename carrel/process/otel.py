"""Spans by OpenTelemetry, which is an extra: only `tracing` imports this, and only where spans are wanted."""

from __future__ import annotations

import threading

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as OTelSpan
from opentelemetry.trace import Tracer as OTelAPITracer

from carrel.process.trace_context import TraceContext
from carrel.process.tracing import Attributes, Span, Tracer
from carrel.process.version import version

CLOSE_SECONDS = 2.0
_SECOND_NS = 1e9


def export_to(process: str, endpoint: str | None) -> Tracer:
    """Spans in batches, on a thread of their own. endpoint: None: as OpenTelemetry's variables say."""
    resource = Resource.create({"service.name": f"carrel-{process}", "service.version": version()})
    # at the process's end `close` sends what is left
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    is_plain = None if endpoint is None else not endpoint.startswith("https:")
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, insecure=is_plain)))
    return OTelTracer(provider)


class OTelTracer:
    """Spans of one provider, which it ends."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("carrel", version())

    def start(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span:
        span = self._tracer.start_span(
            name, context=_context(parent), kind=SpanKind.SERVER, attributes=dict(attributes)
        )
        return _Seen(self._tracer, span)

    def close(self) -> None:
        # a collector that is away would hold up the process's end
        thread = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


class _Seen:
    """One that is collected, unless its trace is not sampled."""

    def __init__(self, tracer: OTelAPITracer, span: OTelSpan) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def trace(self) -> TraceContext:
        own = self._span.get_span_context()
        return TraceContext(f"{own.trace_id:032x}", f"{own.span_id:016x}", int(own.trace_flags))

    def part(self, name: str, begun: float, ended: float) -> None:
        within = set_span_in_context(self._span, Context())
        span = self._tracer.start_span(name, context=within, start_time=_ns(begun))
        span.end(_ns(ended))

    def tell(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, error: str = "") -> None:
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


def _context(parent: TraceContext | None) -> Context:
    if parent is None:
        return Context()
    known = SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(parent.flags),
    )
    return set_span_in_context(NonRecordingSpan(known), Context())


def _ns(seconds: float) -> int:
    return int(seconds * _SECOND_NS)
