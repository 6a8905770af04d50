"""Where a request goes: to the replica that was given most of its prompt before, else to the least loaded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from carrel.cluster.chain import BLOCK_TOKENS
from carrel.cluster.prefix_map import PrefixMap

MAX_LINKS = 1 << 18
# requests by which the holder of a prefix may be busier than the least busy replica
MAX_LEAD = 8


@dataclass(frozen=True, slots=True)
class Route:
    """The wanted replica; `num_tokens` of the prompt went there before."""

    replica: str
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouteCounts:
    """Requests since the start by what decided their way, and tokens of prompts sent where they had been before."""

    by_prefix: int = 0
    by_load: int = 0
    prefix_tokens: int = 0


class Routing:
    """Decides by what this gateway has sent: loads are its own requests, from their choice to their end.

    A replica never has more than `max_requests`; its worker keeps those that it does not run yet in its queue.
    """

    def __init__(
        self,
        max_requests: int,
        has_affinity: bool,
        max_lead: int = MAX_LEAD,
        rng: random.Random | None = None,
    ) -> None:
        self._max_requests = max_requests
        self._has_affinity = has_affinity
        self._max_lead = max_lead
        self._rng = rng or random.Random()
        self._prefixes = PrefixMap(MAX_LINKS)
        self._running: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def choose(self, links: Sequence[bytes], replicas: Sequence[str]) -> Route | None:
        """The best of `replicas`, which has the request from now on until `ended`; None when all have their most."""
        replicas = [replica for replica in replicas if self._running[replica] < self._max_requests]
        if not replicas:
            return None
        least = min(self._running[replica] for replica in replicas)
        holder = self._prefixes.find(links, frozenset(replicas)) if self._has_affinity else None
        if holder is not None and self._running[holder.replica] - least <= self._max_lead:
            route = Route(holder.replica, holder.num_links * BLOCK_TOKENS)
        else:
            route = Route(self._rng.choice([each for each in replicas if self._running[each] == least]))
        self._running[route.replica] += 1
        # at once, so that prompts alike that come together stay together
        self._prefixes.record(links, route.replica)
        return route

    def taken(self, route: Route, links: Sequence[bytes], replica: str) -> None:
        """A replica took the request, be it the wanted one or, if that had no room, another."""
        if replica != route.replica:
            self.ended(route.replica)
            self._running[replica] += 1
            self._prefixes.record(links, replica)
        if replica == route.replica and route.num_tokens:
            self._counts["by_prefix"] += 1
            self._counts["prefix_tokens"] += route.num_tokens
        else:
            self._counts["by_load"] += 1

    def ended(self, replica: str) -> None:
        """A request left the replica that has it."""
        self._running[replica] -= 1
        if not self._running[replica]:
            del self._running[replica]

    def num_running(self, replica: str) -> int:
        """Requests that a replica has."""
        return self._running[replica]

    def forget(self, replica: str) -> None:
        """A replica is gone: nobody holds what it held."""
        self._prefixes.forget(replica)

    def counts(self) -> RouteCounts:
        return RouteCounts(**self._counts)
