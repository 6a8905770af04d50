"""Which replicas there are: their own reports, collected regularly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from carrel.cluster.fleet import Fleet
from carrel.cluster.messages import ReplicaLost, Report
from carrel.cluster.routing import Routing
from carrel.cluster.sums import all_workers
from gateway.errors import ServiceError
from gpu_worker.v1 import gpu_worker_pb2 as pb

INTERVAL_S = 2.0
# while no replica serves, and clients wait for the first one
EMPTY_INTERVAL_S = 0.25

log = logging.getLogger(__name__)


class Census:
    """The last reports. `on_gone` is called with the name of each replica that stopped reporting."""

    def __init__(self, fleet: Fleet, on_gone: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._on_gone = on_gone
        self._reports: dict[str, Report] = {}
        self._suspects: set[str] = set()
        # what each replica told last, also those that are gone: a counter of all of them never falls
        self._told: dict[str, pb.StatsResponse] = {}

    def reports(self) -> tuple[Report, ...]:
        return tuple(self._reports.values())

    def serving(self) -> tuple[str, ...]:
        """Replicas that may be given requests."""
        return tuple(
            name for name, each in self._reports.items() if each.is_serving and name not in self._suspects
        )

    def suspect(self, replica: str) -> None:
        """A replica lost a request: it gets none until it has reported again."""
        self._suspects.add(replica)

    def stats(self) -> pb.StatsResponse | None:
        """All replicas together, as one worker; None when none has reported any."""
        known = [report.stats for report in self._reports.values() if report.stats is not None]
        if not known:
            return None
        return all_workers(known, self._told.values())

    async def take(self) -> None:
        """Ask all replicas once. While they cannot be asked, their last reports count."""
        try:
            reports = {report.replica: report for report in await self._fleet.reports()}
        except (ReplicaLost, ServiceError) as exc:
            log.warning("the replicas do not report: %r", exc)
            return
        for name in self._reports.keys() - reports.keys():
            self._on_gone(name)
        self._suspects.clear()
        self._told |= {name: report.stats for name, report in reports.items() if report.stats is not None}
        self._reports = {name: replace(each, stats=self._told.get(name)) for name, each in reports.items()}

    async def keep_taking(self, interval_s: float = INTERVAL_S) -> None:
        """For ever; ends when cancelled."""
        while True:
            try:
                await self.take()
            except Exception:
                log.exception("the replicas could not be asked")
            await asyncio.sleep(interval_s if self.serving() else EMPTY_INTERVAL_S)


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
