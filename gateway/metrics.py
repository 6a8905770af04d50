"""Prometheus metrics, one registry per service."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_worker.v1 import gpu_worker_pb2 as pb

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
PHASE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, *E2E_BUCKETS_S)


class Metrics:
    """What the gateway counts. Outcomes: stop, length, abort, cancelled, or the error's class name."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._requests = Counter(
            "carrel_requests_total",
            "Requests that ended, by outcome.",
            ("model_name", "endpoint", "outcome"),
            registry=self._registry,
        )
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

    def count_prompt(self, num_tokens: int, key: str) -> None:
        self._prompt_tokens.inc(num_tokens)
        self._count_of_key("prompt_tokens", num_tokens, key)

    def count_answer(self, num_tokens: int, key: str) -> None:
        """For its key only: of all, tokens are counted as they come."""
        self._count_of_key("generation_tokens", num_tokens, key)

    def _count_of_key(self, what: str, amount: int, key: str) -> None:
        if key:
            self._of_key[what].labels(self._model_name, key).inc(amount)

    def render(self, worker: pb.StatsResponse | None) -> bytes:
        """Prometheus text: ours, and the worker's counters when it answered."""
        text = generate_latest(self._registry)
        if worker is None:
            return text
        registry = CollectorRegistry()
        registry.register(_WorkerCollector(worker, self._model_name))
        return text + generate_latest(registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, ("model_name",), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, ("model_name",), registry=self._registry, buckets=buckets).labels(
            self._model_name
        )


class _WorkerCollector(Collector):
    """The worker's counters under `carrel_worker_`."""

    def __init__(self, stats: pb.StatsResponse, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for field in self._stats.DESCRIPTOR.fields:
            name = f"carrel_worker_{field.name}"
            help = f"The worker's {field.name.removesuffix('_total').replace('_', ' ')}."
            kind = CounterMetricFamily if field.name.endswith("_total") else GaugeMetricFamily
            metric = kind(name.removesuffix("_total"), help, labels=("model_name",))
            metric.add_metric((self._model_name,), float(getattr(self._stats, field.name)))
            yield metric
