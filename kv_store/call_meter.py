"""Counters of the store: the duration and outcome of calls, and totals since its start."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from carrel.process.histogram import Histogram
from carrel.process.request_context import RequestContext, working_for
from carrel.process.trace_context import trace_of_call
from carrel.process.tracing import Span, Tracer, Unseen
from kv_store.client.stats import CallStats

# in seconds: from a heartbeat to the training of an index
CALL_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)

OK = grpc.StatusCode.OK.name
# too many for the log
FREQUENT = frozenset({"Heartbeat", "Gather", "GatherRows", "TopK"})

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Method:
    times: Histogram = field(default_factory=lambda: Histogram(CALL_BOUNDS))
    codes: Counter[str] = field(default_factory=Counter)


class CallMeter:
    """Times by method. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._methods: dict[str, _Method] = {}

    def add(self, method: str, seconds: float, code: str) -> None:
        """One call that has ended, with gRPC's name of how."""
        with self._lock:
            known = self._methods.setdefault(method, _Method())
            known.times.observe(seconds)
            known.codes[code] += 1

    def read(self) -> tuple[CallStats, ...]:
        """Return the figures of each method that was called."""
        with self._lock:
            told = [(name, each.times.read(), each.codes) for name, each in sorted(self._methods.items())]
            return tuple(CallStats(name, times.sum, times.counts, dict(codes)) for name, times, codes in told)


class CallWatch(grpc.ServerInterceptor):
    """Tells a meter of every call of one service, from its handler's begin to its end, streams included."""

    def __init__(self, service: str, meter: CallMeter, tracer: Tracer) -> None:
        """tracer: takes spans of the calls that are part of a trace."""
        self._prefix = f"/{service}/"
        self._meter = meter
        self._tracer = tracer

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], call: grpc.HandlerCallDetails
    ) -> Any:
        handler = continuation(call)
        if handler is None or not call.method.startswith(self._prefix):
            return handler
        method, codecs = call.method.removeprefix(self._prefix), _codecs(handler)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(method, handler.unary_stream), *codecs
            )
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._unary(method, handler.stream_unary), *codecs)
        return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary), *codecs)

    def _unary(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            with self._watched(method, request, context):
                return behaviour(request, context)

        return call

    def _streaming(self, method: str, behaviour: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            begun = time.perf_counter()
            try:
                yield from behaviour(request, context)
            finally:
                # another thread may end it: it works for no request
                self._add(method, time.perf_counter() - begun, context)

        return call

    @contextlib.contextmanager
    def _watched(self, method: str, request: Any, context: grpc.ServicerContext) -> Iterator[None]:
        parent = trace_of_call(context.invocation_metadata())
        span: Span = Unseen(None) if parent is None else self._tracer.start(method, parent, {})
        begun = time.perf_counter()
        with working_for(RequestContext(getattr(request, "sequence_id", ""), span.trace)):
            try:
                yield
            finally:
                code = self._add(method, time.perf_counter() - begun, context)
                span.end("" if code == OK else code)

    def _add(self, method: str, seconds: float, context: Any) -> str:
        # None is what a handler that just returns leaves
        code = context.code().name if context.code() else OK
        self._meter.add(method, seconds, code)
        if method not in FREQUENT:
            _log.debug("%s: %s in %.1f ms", method, code, 1e3 * seconds)
        return code


def _codecs(handler: Any) -> tuple[Any, Any]:
    return handler.request_deserializer, handler.response_serializer


@dataclass(slots=True)
class Counters:
    """Under the store's lock. Names are those of `StoreStats`. prefix_lookup_tokens: of prompts, in whole slabs, that
    were looked for; prefix_hit_tokens: that were found. evicted_*: given up to make room."""

    training_seconds: float = 0.0
    num_trainings: int = 0
    gathered_rows: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    evicted_bytes: int = 0
    evicted_sessions: int = 0
    expired_leases: int = 0
