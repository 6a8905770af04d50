"""Reports of the worker and the store, as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from google.protobuf.message import Message
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_worker.v1 import gpu_worker_pb2 as pb

# of the store's, which have metrics of their own
_OF_CALLS = ("call_bounds", "calls")
# of fields that have a value for each of several kinds, what tells these apart
_LABELS = {"decode_stall_seconds": "cause", "fallbacks_total": "kind"}


class WorkerCollector(Collector):
    """The worker's figures under `carrel_worker_`."""

    def __init__(self, stats: pb.StatsResponse, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield from _told("worker", stats, self._model_name)
        usage = GaugeMetricFamily(
            "carrel_worker_slot_usage_ratio", "The share of slots in use.", labels=("model_name",)
        )
        usage.add_metric((self._model_name,), stats.slot_used_tokens / (stats.slot_capacity_tokens or 1))
        yield usage


class StoreCollector(Collector):
    """The store's figures under `carrel_store_`, and how long its calls take."""

    def __init__(self, stats: pb.StoreStatsResponse, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield from _told("store", stats, self._model_name, without=_OF_CALLS)
        labels = ("model_name", "method")
        seconds = HistogramMetricFamily(
            "carrel_store_call_seconds", "Of one call to the store.", labels=labels
        )
        calls = CounterMetricFamily(
            "carrel_store_calls", "Calls to the store, by how they ended.", labels=(*labels, "code")
        )
        for each in stats.calls:
            buckets = _buckets(stats.call_bounds, each.counts)
            seconds.add_metric((self._model_name, each.method), buckets, each.seconds)
            for code, count in sorted(each.codes.items()):
                calls.add_metric((self._model_name, each.method, code), count)
        yield seconds
        yield calls


def _told(process: str, stats: Message, model_name: str, without: tuple[str, ...] = ()) -> Iterator[Metric]:
    """Each field under its name: `_total` counts, `_seconds` and `_ratio` are histograms, all else is of now."""
    for field in (each.name for each in stats.DESCRIPTOR.fields if each.name not in without):
        help = f"The {process}'s {field.removesuffix('_total').replace('_', ' ')}."
        name, value, label = f"carrel_{process}_{field}", getattr(stats, field), _LABELS.get(field)
        names = ("model_name",) if label is None else ("model_name", label)
        values: dict[tuple[str, ...], Any] = (
            {(model_name,): value}
            if label is None
            else {(model_name, kind): value[kind] for kind in sorted(value)}
        )
        if field.endswith(("_seconds", "_ratio")):
            histograms = HistogramMetricFamily(name, help, labels=names)
            for labels, each in values.items():
                if each.counts:
                    histograms.add_metric(labels, _buckets(each.bounds, each.counts), each.sum)
            yield histograms
            continue
        kind = CounterMetricFamily if field.endswith("_total") else GaugeMetricFamily
        numbers = kind(name.removesuffix("_total"), help, labels=names)
        for labels, each in values.items():
            numbers.add_metric(labels, float(each))
        yield numbers


def _buckets(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Return cumulative counts up to each bound, from counts between bounds."""
    return list(zip([*map(str, bounds), "+Inf"], map(float, accumulate(counts)), strict=True))
