"""Which trace a request belongs to, as W3C's `traceparent` header says it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

TRACEPARENT = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace: ids in hexadecimal digits, 32 of the trace and 16 of the span that what comes next is part
    of. As text it is a header's value."""

    trace_id: str
    span_id: str
    flags: int = _SAMPLED

    @property
    def is_sampled(self) -> bool:
        """Return whether the caller that began the trace keeps it."""
        return bool(self.flags & _SAMPLED)

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def read_traceparent(text: str | None) -> TraceContext | None:
    """None for what is none, or is no valid one: it is ignored, whoever sent it."""
    found = _FORM.fullmatch(text or "")
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    # only a later version may have more fields
    is_known = version != "ff" and not (version == "00" and rest)
    if not is_known or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16))


def trace_of_call(metadata: Iterable[tuple[str, Any]] | None) -> TraceContext | None:
    """Return the trace context of a gRPC call, by its metadata."""
    return read_traceparent(next((value for key, value in metadata or () if key == TRACEPARENT), None))
