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
    """Decides by what this gateway has sent: loads are its own running requests."""

    def __init__(
        self, has_affinity: bool, max_lead: int = MAX_LEAD, rng: random.Random | None = None
    ) -> None:
        self._has_affinity = has_affinity
        self._max_lead = max_lead
        self._rng = rng or random.Random()
        self._prefixes = PrefixMap(MAX_LINKS)
        self._running: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def choose(self, links: Sequence[bytes], replicas: Sequence[str]) -> Route | None:
        """The best of `replicas`; None when there are none."""
        if not replicas:
            return None
        least = min(self._running[replica] for replica in replicas)
        holder = self._prefixes.find(links, frozenset(replicas)) if self._has_affinity else None
        if holder is not None and self._running[holder.replica] - least <= self._max_lead:
            return Route(holder.replica, holder.num_links * BLOCK_TOKENS)
        return Route(self._rng.choice([each for each in replicas if self._running[each] == least]))

    def started(self, route: Route | None, links: Sequence[bytes], replica: str) -> None:
        """A replica took a request, be it the wanted one or not."""
        self._running[replica] += 1
        self._prefixes.record(links, replica)
        is_hit = route is not None and route.num_tokens > 0 and route.replica == replica
        self._counts["by_prefix" if is_hit else "by_load"] += 1
        if is_hit and route is not None:
            self._counts["prefix_tokens"] += route.num_tokens

    def ended(self, replica: str) -> None:
        self._running[replica] -= 1
        if not self._running[replica]:
            del self._running[replica]

    def num_running(self, replica: str) -> int:
        """Requests of this gateway that a replica runs."""
        return self._running[replica]

    def forget(self, replica: str) -> None:
        """A replica was lost: nothing is known of it any more."""
        self._prefixes.forget(replica)

    def counts(self) -> RouteCounts:
        return RouteCounts(**self._counts)
