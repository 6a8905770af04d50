"""Prometheus text about the cluster: its replicas, and how requests were routed."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from carrel.cluster.census import Census
from carrel.cluster.routing import Routing


class ClusterMetrics(Collector):
    """`carrel_cluster_*`, beside the sums over all replicas that the gateway gives as `carrel_worker_*`."""

    def __init__(self, census: Census, routing: Routing) -> None:
        self._census = census
        self._routing = routing
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        reports, counts = self._census.reports(), self._routing.counts()
        replicas = GaugeMetricFamily("carrel_cluster_replicas", "Replicas by state.", labels=("state",))
        num_serving = len(self._census.serving())
        replicas.add_metric(("serving",), num_serving)
        replicas.add_metric(("other",), len(reports) - num_serving)
        yield replicas
        routed = CounterMetricFamily(
            "carrel_cluster_routed_requests", "Requests given to replicas, by what decided.", labels=("by",)
        )
        for kind in ("session", "prefix", "load"):
            routed.add_metric((kind,), counts[f"by_{kind}"])
        yield routed
        tokens = CounterMetricFamily(
            "carrel_cluster_routed_prefix_tokens", "Tokens of prompts that went where they had been before."
        )
        tokens.add_metric((), counts["prefix_tokens"])
        yield tokens
        for name, help in (
            ("running", "Requests that a replica runs."),
            ("waiting", "Requests waiting in a replica."),
        ):
            gauge = GaugeMetricFamily(f"carrel_cluster_replica_{name}", help, labels=("replica", "node"))
            for report in reports:
                if report.stats is not None:
                    gauge.add_metric((report.replica, report.node), getattr(report.stats, name))
            yield gauge
