"""What the worker and the store tell of themselves, as metrics."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from google.protobuf.message import Message
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_worker.v1 import gpu_worker_pb2 as pb

# of the store's, which have metrics of their own
_OF_CALLS = ("call_bounds", "calls")


class WorkerCollector(Collector):
    """The worker's counters under `carrel_worker_`."""

    def __init__(self, stats: pb.StatsResponse, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        names = tuple(field.name for field in self._stats.DESCRIPTOR.fields)
        yield from _scalars("worker", self._stats, names, self._model_name)


class StoreCollector(Collector):
    """The store's counters under `carrel_store_`, and how long its calls take."""

    def __init__(self, stats: pb.StoreStatsResponse, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        names = tuple(field.name for field in stats.DESCRIPTOR.fields if field.name not in _OF_CALLS)
        yield from _scalars("store", stats, names, self._model_name)
        labels = ("model_name", "method")
        seconds = HistogramMetricFamily(
            "carrel_store_call_seconds", "Of one call to the store.", labels=labels
        )
        calls = CounterMetricFamily(
            "carrel_store_calls", "Calls to the store, by how they ended.", labels=(*labels, "code")
        )
        bounds = [*map(str, stats.call_bounds), "+Inf"]
        for each in stats.calls:
            buckets = list(zip(bounds, map(float, accumulate(each.counts)), strict=True))
            seconds.add_metric((self._model_name, each.method), buckets, each.seconds)
            for code, count in sorted(each.codes.items()):
                calls.add_metric((self._model_name, each.method, code), count)
        yield seconds
        yield calls


def _scalars(process: str, stats: Message, names: tuple[str, ...], model_name: str) -> Iterator[Metric]:
    for field in names:
        name = f"carrel_{process}_{field}"
        help = f"The {process}'s {field.removesuffix('_total').replace('_', ' ')}."
        kind = CounterMetricFamily if field.endswith("_total") else GaugeMetricFamily
        metric = kind(name.removesuffix("_total"), help, labels=("model_name",))
        metric.add_metric((model_name,), float(getattr(stats, field)))
        yield metric
