"""The cluster: gateways, routing and replicas, event by event."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.cluster_model.measured import Measured
from benchmarks.cluster_model.parameters import ClusterParameters, Mix, Routing
from benchmarks.cluster_model.replica import INFINITE, Replica, Totals
from benchmarks.cluster_model.traffic import Prefix, Request

GATEWAY = "gateway"


@dataclass(frozen=True)
class ClusterCase:
    """What is simulated. num_gateways: processes of one core each. load: of what the cluster can do; None: more."""

    num_gpus: int
    num_gateways: int
    mix: Mix
    routing: Routing
    policy: str
    load: float | None = None

    def __str__(self) -> str:
        load = "more than it can do" if self.load is None else f"{self.load:.0%}"
        cluster = f"{self.num_gpus} GPUs, {self.num_gateways} gateways"
        return f"{cluster}, {self.mix.name}, {self.routing}, {self.policy}, {load}"


@dataclass
class Outcome:
    """The outcome of a run. totals: of all replicas in the window, seconds `begin` to `end`; requests: all that came.

    gateway_s: processor time in the window; work_s: of a request, the mean.
    """

    requests: list[Request]
    begin: float
    end: float
    totals: list[Totals]
    gateway_s: float = 0.0
    work_s: float = 0.0
    waiting_s: dict[str, float] = field(default_factory=dict)
    num_unfinished: int = 0

    @property
    def window_s(self) -> float:
        return self.end - self.begin


class Cluster:
    """One run. `run` may be called once."""

    def __init__(self, case: ClusterCase, measured: Measured, parameters: ClusterParameters) -> None:
        self._case, self._measured, self._parameters = case, measured, parameters
        self._replicas = [
            Replica(measured, parameters, lambda prefix, index=index: self._dropped(index, prefix))  # type: ignore[misc]
            for index in range(case.num_gpus)
        ]
        self._versions = [0] * case.num_gpus
        # tokens of unfinished requests; stale entries of the heap are those that say another load
        self._loads = [0] * case.num_gpus
        self._by_load = [(0, index) for index in range(case.num_gpus)]
        self._home: dict[int, int] = {}
        self._gateway_until = [0.0] * case.num_gateways
        # (when, order, what): a request for the router, or a replica that changes, and its version
        self._events: list[tuple[float, int, Request | int, int]] = []
        self._order = 0

    def place(self, prefixes: Iterable[Prefix]) -> None:
        """Prefixes that are known before the first request, each on one replica."""
        for prefix in prefixes:
            index = prefix.number % len(self._replicas)
            if self._replicas[index].arena.keep(prefix.number, prefix.num_tokens):
                self._home[prefix.number] = index

    def run(
        self, arrivals: Iterable[Request], begin: float = 0.0, end: float = INFINITE, drains: bool = True
    ) -> Outcome:
        """Count from `begin` to `end`, at most until all are answered; `drains`: go on until they are."""
        requests = []
        work_s: list[float] = []
        for request in arrivals:
            requests.append(request)
            work_s.append(self._through_gateway(request))
        now, counted = 0.0, None
        is_begun = False
        while self._events:
            when, _, subject, version = heapq.heappop(self._events)
            if not is_begun and when >= begin:
                self._restart(begin)
                is_begun = True
            if counted is None and when > end:
                counted = self._restart(end)
                if not drains:
                    break
            now = when
            if isinstance(subject, int):
                if version == self._versions[subject]:
                    self._change(subject, now)
            else:
                self._route(subject, now)
        end = min(end, now) if counted is None else end
        return self._outcome(requests, work_s, counted or self._restart(end), begin, end)

    def _restart(self, now: float) -> list[Totals]:
        """Reset the counters; returns what was counted."""
        return [replica.restart(now) for replica in self._replicas]

    def _push(self, when: float, subject: Request | int, version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, subject, version))

    def _through_gateway(self, request: Request) -> float:
        """A process takes requests one after the other, and all their work before they go on."""
        cost, kind = self._measured.gateway, request.kind
        tokens_us = cost.prompt_token_us * kind.prompt_tokens + cost.output_token_us * kind.output_tokens
        work_s = (cost.request_us + tokens_us) / 1e6
        process = request.number % len(self._gateway_until)
        done = max(request.arrival, self._gateway_until[process]) + work_s
        self._gateway_until[process] = done
        request.routed = done
        self._push(done, request)
        return work_s

    def _route(self, request: Request, now: float) -> None:
        prefix = request.prefix
        home = self._home.get(prefix) if self._case.routing is Routing.AFFINITY and prefix >= 0 else None
        index = self._least_loaded() if home is None else home
        request.replica = index
        if prefix >= 0:
            self._home.setdefault(prefix, index)
        self._load(index, request.num_tokens)
        replica = self._replicas[index]
        replica.advance(now)
        replica.enqueue(request)
        self._reschedule(index)

    def _change(self, index: int, now: float) -> None:
        replica = self._replicas[index]
        replica.advance(now)
        for request in replica.change():
            self._load(index, -request.num_tokens)
        self._reschedule(index)

    def _reschedule(self, index: int) -> None:
        self._versions[index] += 1
        when = self._replicas[index].next_change()
        if when < INFINITE:
            self._push(when, index, self._versions[index])

    def _dropped(self, index: int, prefix: int) -> None:
        if self._home.get(prefix) == index:
            del self._home[prefix]

    def _load(self, index: int, added: int) -> None:
        self._loads[index] += added
        heapq.heappush(self._by_load, (self._loads[index], index))

    def _least_loaded(self) -> int:
        while self._by_load[0][0] != self._loads[self._by_load[0][1]]:
            heapq.heappop(self._by_load)
        return self._by_load[0][1]

    def _outcome(
        self, requests: list[Request], work_s: list[float], totals: list[Totals], begin: float, end: float
    ) -> Outcome:
        outcome = Outcome(requests, begin, end, totals)
        waiting = outcome.waiting_s
        for of_replica in totals:
            for cause, seconds in of_replica.waiting_s.items():
                waiting[cause] = waiting.get(cause, 0.0) + seconds

        def within(first: float, last: float) -> float:
            return max(0.0, min(last, end) - max(first, begin))

        waiting[GATEWAY] = sum(
            within(request.arrival, request.routed - work)
            for request, work in zip(requests, work_s, strict=True)
        )
        outcome.gateway_s = sum(
            within(request.routed - work, request.routed)
            for request, work in zip(requests, work_s, strict=True)
        )
        outcome.work_s = sum(work_s) / max(1, len(work_s))
        outcome.num_unfinished = sum(request.finished < 0 for request in requests)
        return outcome
