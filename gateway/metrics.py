"""Prometheus metrics, one registry per service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from carrel.process.version import commit, version
from gateway import errors
from gateway.errors import ServiceError
from gateway.relayed_metrics import StoreCollector, WorkerCollector
from gpu_worker.v1 import gpu_worker_pb2 as pb

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
PHASE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, *E2E_BUCKETS_S)
M = TypeVar("M", Counter, Gauge, Histogram)
# why a request was not begun
REASONS: dict[type[Exception], str] = {
    errors.Unauthorized: "unauthorized",
    errors.TooManyRequests: "too_many_requests",
    errors.Overloaded: "overloaded",
    errors.ShuttingDown: "shutting_down",
    errors.WorkerUnavailable: "worker_unavailable",
    errors.VersionMismatch: "version_mismatch",
    errors.StoreUnavailable: "store_unavailable",
    errors.InvalidRequest: "invalid_request",
    errors.UnknownModel: "unknown_model",
}


class Metrics:
    """Metrics of the gateway. Outcomes: stop, length, abort, cancelled, or the error's class name."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._requests = self._metric(
            Counter, "requests_total", "Requests that ended, by outcome.", "endpoint", "outcome"
        )
        self._rejected = self._metric(
            Counter, "requests_rejected_total", "Requests that were refused, by reason.", "reason"
        )
        for reason in REASONS.values():
            self._rejected.labels(model_name, reason)
        self._of_key = {
            what: self._metric(
                Counter, f"key_{what}_total", f"Of one API key, by its name or a hash: {text}.", "key"
            )
            for what, text in (
                ("requests", "requests that ended"),
                ("prompt_tokens", "prompt tokens of admitted requests"),
                ("generation_tokens", "tokens generated for requests that ended"),
            )
        }
        built = self._metric(Gauge, "build_info", "1; its labels say what runs.", "version", "commit")
        built.labels(model_name, version(), commit()).set(1)
        self._prompt_tokens = self._own(Counter, "prompt_tokens_total", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._own(Counter, "generation_tokens_total", "Tokens generated.")
        self.running = self._own(Gauge, "gateway_requests_running", "Requests now being served.")
        self.incoming = self._own(
            Gauge, "gateway_incoming_body_bytes", "Request bodies being received or parsed."
        )
        self.draining = self._own(Gauge, "draining", "1 while running requests finish and none is let in.")
        self.ttft = self._times("time_to_first_token", "Request in to first token.", TTFT_BUCKETS_S)
        self.queue = self._times(
            "request_queue_time", "In the worker, until its prompt is begun.", PHASE_BUCKETS_S
        )
        self.prefill = self._times("request_prefill_time", "Prompt begun to first token.", PHASE_BUCKETS_S)
        self.decode = self._times("request_decode_time", "First token to the answer's end.", PHASE_BUCKETS_S)
        self.itl = self._times("inter_token_latency", "Between two tokens.", ITL_BUCKETS_S)
        self.tpot = self._times(
            "request_time_per_output_token", "Between two tokens, mean of an answer.", ITL_BUCKETS_S
        )
        self.e2e = self._times("e2e_request_latency", "Request in to its end.", E2E_BUCKETS_S)

    def count_request(self, endpoint: str, outcome: str, key: str) -> None:
        """key: its name; empty where there are no keys."""
        self._requests.labels(self._model_name, endpoint, outcome).inc()
        self._count_of_key("requests", 1, key)

    def count_rejected(self, error: Exception) -> None:
        """One request that ended with this before anything was answered; counted where that is one of REASONS."""
        if (reason := REASONS.get(type(error))) is not None:
            self._rejected.labels(self._model_name, reason).inc()

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count a refusal of a request that has not reached the service, which counts its own."""
        try:
            yield
        except ServiceError as error:
            self.count_rejected(error)
            raise

    def count_prompt(self, num_tokens: int, key: str) -> None:
        self._prompt_tokens.inc(num_tokens)
        self._count_of_key("prompt_tokens", num_tokens, key)

    def count_answer(self, num_tokens: int, key: str) -> None:
        """For its key only: of all, tokens are counted as they come."""
        self._count_of_key("generation_tokens", num_tokens, key)

    def _count_of_key(self, what: str, amount: int, key: str) -> None:
        if key:
            self._of_key[what].labels(self._model_name, key).inc(amount)

    def render(self, worker: pb.StatsResponse | None, store: pb.StoreStatsResponse | None = None) -> bytes:
        """Prometheus text: ours, and what worker and store told of themselves, if they did."""
        registry = CollectorRegistry()
        if worker is not None:
            registry.register(WorkerCollector(worker, self._model_name))
        if store is not None:
            registry.register(StoreCollector(store, self._model_name))
        return generate_latest(self._registry) + generate_latest(registry)

    def _metric(self, kind: type[M], name: str, text: str, *labels: str, **options: Any) -> M:
        return kind(f"carrel_{name}", text, ("model_name", *labels), registry=self._registry, **options)

    def _own(self, kind: type[M], name: str, text: str, **options: Any) -> M:
        """A metric that has no labels but the model's name."""
        return self._metric(kind, name, text, **options).labels(self._model_name)

    def _times(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._own(Histogram, f"{name}_seconds", text, buckets=buckets)
