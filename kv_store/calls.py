"""Calls of the store's service: each ends with a status, and is counted, timed, logged and traced."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import grpc

from carrel.process.histogram import Histogram
from carrel.process.request_context import RequestContext, working_for
from carrel.process.trace_context import trace_of_call
from carrel.process.tracing import Span, Tracer, Unseen
from kv_store.client.errors import StoreFull
from kv_store.client.rpc import ERRORS, MISSING_BYTES_KEY
from kv_store.client.stats import CallStats
from kv_store.errors import TrainingFailed
from kv_store.v1 import kv_store_pb2 as pb
from kv_store.v1 import kv_store_pb2_grpc

# in seconds: from a heartbeat to the training of an index
CALL_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)

OK = grpc.StatusCode.OK.name
# too many for the log
FREQUENT = frozenset({"Heartbeat", "Gather", "GatherRows", "TopK"})

_STATUSES: dict[type[Exception], grpc.StatusCode] = {
    **{kind: status for status, kind in ERRORS.items()},
    TrainingFailed: grpc.StatusCode.INTERNAL,
}

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


class WatchedServicer(kv_store_pb2_grpc.KVStoreServicer):
    """A servicer whose methods are decorated with `unary` or `streaming`."""

    def __init__(self, meter: CallMeter, tracer: Tracer) -> None:
        """tracer: takes spans of the calls that are part of a trace."""
        self._meter = meter
        self._tracer = tracer

    @contextlib.contextmanager
    def ending(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        """End a call with the status of the error that is raised within, and count it."""
        begun = time.perf_counter()
        try:
            yield
        except Exception as exc:
            _abort(context, method, exc)
        finally:
            seconds, code = time.perf_counter() - begun, _code(context)
            self._meter.add(method, seconds, code)
            if method not in FREQUENT:
                _log.debug("%s: %s in %.1f ms", method, code, 1e3 * seconds)

    @contextlib.contextmanager
    def tracing(self, method: str, request: Any, context: grpc.ServicerContext) -> Iterator[None]:
        """Work for the request's sequence, in a span where the call is part of a trace."""
        parent = trace_of_call(context.invocation_metadata())
        span: Span = Unseen(None) if parent is None else self._tracer.start(method, parent, {})
        with working_for(RequestContext(getattr(request, "sequence_id", ""), span.trace)):
            try:
                yield
            finally:
                code = _code(context)
                span.end("" if code == OK else code)


S = TypeVar("S", bound=WatchedServicer)


def unary(method: Callable[[S, Any], Any]) -> Callable[[S, Any, grpc.ServicerContext], Any]:
    @functools.wraps(method)
    def call(servicer: S, request: Any, context: grpc.ServicerContext) -> Any:
        name = method.__name__
        with servicer.tracing(name, request, context), servicer.ending(name, context):
            return method(servicer, request)

    return call


def streaming(
    method: Callable[[S, Any], Iterator[bytes]],
) -> Callable[[S, Any, grpc.ServicerContext], Iterator[pb.RowsChunk]]:
    @functools.wraps(method)
    def call(servicer: S, request: Any, context: grpc.ServicerContext) -> Iterator[pb.RowsChunk]:
        # Another thread may end it: it works for no request.
        with servicer.ending(method.__name__, context):
            for data in method(servicer, request):
                yield pb.RowsChunk(data=data)

    return call


def _abort(context: grpc.ServicerContext, method: str, error: Exception) -> NoReturn:
    """End the call with the error's status; of an unexpected error the caller learns nothing, and the log all."""
    match error:
        case StoreFull(missing_bytes=missing) if missing:
            context.set_trailing_metadata(((MISSING_BYTES_KEY, str(missing)),))
    if (status := _STATUSES.get(type(error))) is not None:
        context.abort(status, str(error))
    _log.error("%s failed", method, exc_info=error)
    context.abort(grpc.StatusCode.INTERNAL, f"{method} failed in the store; its log says why")
    raise error


def _code(context: Any) -> str:
    # None is what a handler that just returns leaves
    return context.code().name if context.code() else OK
