"""Prometheus metrics, one registry per service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
        self._requests = Counter(
            "carrel_requests_total",
            "Requests that ended, by outcome.",
            ("model_name", "endpoint", "outcome"),
            registry=self._registry,
        )
        self._rejected = Counter(
            "carrel_requests_rejected_total",
            "Requests that were refused, by reason.",
            ("model_name", "reason"),
            registry=self._registry,
        )
        for reason in REASONS.values():
            self._rejected.labels(model_name, reason)
        self._prompt_tokens = self._counter(
            "carrel_prompt_tokens_total", "Prompt tokens of admitted requests."
        )
        self._of_key = {
            what: Counter(
                f"carrel_key_{what}_total",
                f"Of one API key, by its name or a hash: {text}.",
                ("model_name", "key"),
                registry=self._registry,
            )
            for what, text in (
                ("requests", "requests that ended"),
                ("prompt_tokens", "prompt tokens of admitted requests"),
                ("generation_tokens", "tokens generated for requests that ended"),
            )
        }
        self.generation_tokens = self._counter("carrel_generation_tokens_total", "Tokens generated.")
        self.running = Gauge(
            "carrel_gateway_requests_running",
            "Requests now being served.",
            ("model_name",),
            registry=self._registry,
        ).labels(model_name)
        self.incoming = Gauge(
            "carrel_gateway_incoming_body_bytes", "Request bodies being received or parsed.", ("model_name",),
            registry=self._registry,
        ).labels(model_name)  # fmt: skip
        self.draining = Gauge(
            "carrel_draining", "1 while running requests finish and none is let in.", ("model_name",),
            registry=self._registry,
        ).labels(model_name)  # fmt: skip
        Gauge(
            "carrel_build_info", "1; its labels say what runs.", ("model_name", "version", "commit"),
            registry=self._registry,
        ).labels(model_name, version(), commit()).set(1)  # fmt: skip
        self.ttft = self._histogram(
            "carrel_time_to_first_token_seconds", "Request in to first token.", TTFT_BUCKETS_S
        )
        self.queue = self._histogram(
            "carrel_request_queue_time_seconds", "In the worker, until its prompt is begun.", PHASE_BUCKETS_S
        )
        self.prefill = self._histogram(
            "carrel_request_prefill_time_seconds", "Prompt begun to first token.", PHASE_BUCKETS_S
        )
        self.decode = self._histogram(
            "carrel_request_decode_time_seconds", "First token to the answer's end.", PHASE_BUCKETS_S
        )
        self.itl = self._histogram("carrel_inter_token_latency_seconds", "Between two tokens.", ITL_BUCKETS_S)
        self.tpot = self._histogram(
            "carrel_request_time_per_output_token_seconds",
            "Between two tokens, mean of an answer.",
            ITL_BUCKETS_S,
        )
        self.e2e = self._histogram(
            "carrel_e2e_request_latency_seconds", "Request in to its end.", E2E_BUCKETS_S
        )

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

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, ("model_name",), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, ("model_name",), registry=self._registry, buckets=buckets).labels(
            self._model_name
        )
