"""The request that runs now, for log lines and for calls to the next process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from carrel.process.trace_context import TRACEPARENT, TraceContext


@dataclass(frozen=True, slots=True)
class RequestContext:
    """trace: None for a request of no trace."""

    request_id: str
    trace: TraceContext | None = None


_current: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def current_request() -> RequestContext | None:
    """Return the request of this task or thread; None where it works for no request, or for many."""
    return _current.get()


@contextmanager
def working_for(request: RequestContext) -> Iterator[None]:
    """Within it, and in tasks that are begun within it, this is the current request."""
    token = _current.set(request)
    try:
        yield
    finally:
        _current.reset(token)


def rename_request(request_id: str) -> None:
    """The current request has this id, until the `working_for` around it ends."""
    if (request := _current.get()) is not None:
        _current.set(replace(request, request_id=request_id))


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return a gRPC call's metadata for the current request's trace; empty without one."""
    request = current_request()
    return () if request is None or request.trace is None else ((TRACEPARENT, str(request.trace)),)
