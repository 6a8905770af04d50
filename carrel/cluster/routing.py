"""Where a request goes: to its session's replica, else to the one with the longest prefix of its prompt, else by
load.

A prompt is a chain of hashes here: one link for each block of tokens, over all tokens up to the block's last. The
worker's store names its slabs in the same way; blocks here are short, so that routing needs to know no layout.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 64
# what decides a route; two prompts that are alike for so long are not told apart
MAX_BLOCKS = 4096
MAX_LINKS = 1 << 18
MAX_SESSIONS = 1 << 16
# requests by which the holder of a prefix may be busier than the least busy replica
MAX_LEAD = 8


def prompt_chain(caller: bytes, token_ids: Sequence[int], cache_salt: str = "") -> tuple[bytes, ...]:
    """The links of a prompt's whole blocks. `caller` and `cache_salt` salt them: who may not share a cache shares no
    link."""
    ids = array("I", token_ids[: BLOCK_TOKENS * MAX_BLOCKS])
    link, links = b"", []
    if cache_salt:
        link = hashlib.blake2b(cache_salt.encode(), key=caller[:64], digest_size=16, person=b"salt").digest()
    for begin in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        content = ids[begin : begin + BLOCK_TOKENS].tobytes()
        link = hashlib.blake2b(content, key=link or caller[:64], digest_size=16).digest()
        links.append(link)
    return tuple(links)


def session_link(caller: bytes, session_id: str) -> bytes:
    """A session's name in routing: it reveals neither the session nor `caller`; b"" for none."""
    if not session_id:
        return b""
    return hashlib.blake2b(session_id.encode(), key=caller[:64], digest_size=16, person=b"session").digest()


@dataclass(frozen=True, slots=True)
class Route:
    """The wanted replica; `num_tokens` of the prompt went there before. `by_session`: as its last turn did."""

    replica: str
    num_tokens: int = 0
    by_session: bool = False


class PrefixMap:
    """The last replica of each link, for the `capacity` links used last.

    It remembers decisions, not caches: a replica may have evicted a prefix, and then computes it again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._replica_of: OrderedDict[bytes, str] = OrderedDict()

    def find(self, links: Sequence[bytes], replicas: Collection[str]) -> tuple[str, int] | None:
        """Return the replica that was given the longest part of a chain, and the number of its links.

        None when none of `replicas` was given the first link.
        """
        for number in range(len(links), 0, -1):
            replica = self._replica_of.get(links[number - 1])
            if replica is not None and replica in replicas:
                return replica, number
        return None

    def record(self, links: Sequence[bytes], replica: str) -> None:
        """A replica was given this chain."""
        # last ones first: what is forgotten first is the end of a chain, never its beginning alone
        for link in reversed(links):
            self._replica_of[link] = replica
            self._replica_of.move_to_end(link)
        while len(self._replica_of) > self._capacity:
            self._replica_of.popitem(last=False)

    def forget(self, replica: str) -> None:
        """A replica is gone, and its store with it."""
        for link in [link for link, holder in self._replica_of.items() if holder == replica]:
            del self._replica_of[link]


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
        # a session is a chain of one link
        self._sessions = PrefixMap(MAX_SESSIONS)
        self._running: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def choose(self, links: Sequence[bytes], replicas: Sequence[str], session: bytes = b"") -> Route | None:
        """The best of `replicas`, which has the request from now on until `ended`; None when all are full.

        session: as `session_link` names it.
        """
        free = [replica for replica in replicas if self._running[replica] < self._max_requests]
        if not free:
            return None
        route = self._by_session(links, session, free) or self._by_prefix(links, free) or self._by_load(free)
        self._running[route.replica] += 1
        # at once, so that prompts alike that come together stay together
        self._record(links, session, route.replica)
        return route

    def taken(self, route: Route, links: Sequence[bytes], replica: str, session: bytes = b"") -> None:
        """A replica took the request, be it the wanted one or, if that had no room, another."""
        if replica != route.replica:
            self.ended(route.replica)
            self._running[replica] += 1
            self._record(links, session, replica)
            self._counts["by_load"] += 1
        else:
            kind = "by_session" if route.by_session else "by_prefix" if route.num_tokens else "by_load"
            self._counts[kind] += 1
            self._counts["prefix_tokens"] += route.num_tokens

    def ended(self, replica: str) -> None:
        """A request left the replica that has it."""
        self._running[replica] -= 1
        if not self._running[replica]:
            del self._running[replica]

    def num_running(self, replica: str) -> int:
        """Requests that a replica has."""
        return self._running[replica]

    def forget(self, replica: str) -> None:
        """A replica is gone, with its prefixes and sessions."""
        self._prefixes.forget(replica)
        self._sessions.forget(replica)

    def counts(self) -> Counter[str]:
        """Requests since the start by what routed them: `by_session`, `by_prefix` and `by_load`; and `prefix_tokens`,
        which went where they had been before."""
        return self._counts

    def _by_session(self, links: Sequence[bytes], session: bytes, free: Collection[str]) -> Route | None:
        """However busy it is: its user waits for the previous turn anyway, and other requests go elsewhere."""
        if not (self._has_affinity and session) or (last := self._sessions.find([session], free)) is None:
            return None
        replica, _ = last
        _, num_links = self._prefixes.find(links, (replica,)) or (replica, 0)
        return Route(replica, num_links * BLOCK_TOKENS, by_session=True)

    def _by_prefix(self, links: Sequence[bytes], free: Collection[str]) -> Route | None:
        holder = self._prefixes.find(links, frozenset(free)) if self._has_affinity else None
        if holder is None:
            return None
        replica, num_links = holder
        is_busy = self._running[replica] - self._least(free) > self._max_lead
        return None if is_busy else Route(replica, num_links * BLOCK_TOKENS)

    def _by_load(self, free: Collection[str]) -> Route:
        least = self._least(free)
        return Route(self._rng.choice([each for each in free if self._running[each] == least]))

    def _least(self, free: Collection[str]) -> int:
        return min(self._running[replica] for replica in free)

    def _record(self, links: Sequence[bytes], session: bytes, replica: str) -> None:
        self._prefixes.record(links, replica)
        if session:
            self._sessions.record([session], replica)
