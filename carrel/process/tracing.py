"""Spans of a request, for whoever collects them; and nothing at all where nobody does."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from carrel.process.options import OptionError, option
from carrel.process.trace_context import TraceContext

OTLP_HELP = (
    "send spans of each request there, over OTLP's gRPC: http://HOST:4317, https://HOST:4317 or unix:PATH (default: "
    "OTEL_EXPORTER_OTLP_ENDPOINT, and none without it)"
)
# of OpenTelemetry itself
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
DISABLED = "OTEL_SDK_DISABLED"

Attributes = Mapping[str, str | int | float]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Where spans go."""

    otlp_endpoint: str | None = option(None, OTLP_HELP, metavar="URL")


class Span(Protocol):
    """A piece of work from `Tracer.start` to `end`. trace: what work within it, here or elsewhere, is part of; None: of
    no trace. Times are Unix times in seconds."""

    @property
    def trace(self) -> TraceContext | None: ...

    def part(self, name: str, begun: float, ended: float) -> None:
        """A piece of it that is over."""

    def tell(self, attributes: Attributes) -> None:
        """Add attributes to the span."""

    def end(self, error: str = "") -> None:
        """Once. error: why it failed; empty: it did not."""


class Tracer(Protocol):
    def start(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span:
        """A span from now on, within `parent`, or of a trace of its own."""

    def close(self) -> None:
        """Send what has not been sent, within seconds."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """A span that nobody collects: its work is part of what it was begun in."""

    trace: TraceContext | None

    def part(self, name: str, begun: float, ended: float) -> None:
        """Nothing."""

    def tell(self, attributes: Attributes) -> None:
        """Nothing."""

    def end(self, error: str = "") -> None:
        """Nothing."""


class NoTracer:
    """Passes on the traces of others."""

    def start(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span:
        return Unseen(parent)

    def close(self) -> None:
        """Nothing."""


def make_tracer(process: str, endpoint: str | None, environment: Mapping[str, str] = os.environ) -> Tracer:
    """By the option --otlp-endpoint, else by OpenTelemetry's own variables. Raises OptionError where the option is
    given and OpenTelemetry is not installed; variables, which may be meant for others, are not followed then."""
    is_asked = endpoint or any(environment.get(name) for name in ENDPOINTS)
    if not is_asked or environment.get(DISABLED, "").lower() == "true":
        return NoTracer()
    try:
        # loaded by those alone who use it
        from carrel.process.otel import export_to
    except ImportError as error:
        if endpoint:
            raise OptionError(
                f"--otlp-endpoint {endpoint}: OpenTelemetry is not installed: pip install 'carrel[tracing]'"
            ) from error
        log.warning("no spans are sent: OpenTelemetry is not installed: pip install 'carrel[tracing]'")
        return NoTracer()
    return export_to(process, endpoint)
