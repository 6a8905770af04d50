"""Which replica was given which prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """A replica, and how many links of a chain it was given before."""

    replica: str
    num_links: int


class PrefixMap:
    """The last replica of each link, for the `capacity` links used last.

    It remembers decisions, not caches: a replica may have evicted a prefix, and then computes it again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._replica_of: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replica_of)

    def find(self, links: Sequence[bytes], replicas: Collection[str]) -> Holder | None:
        """Of `replicas`, the one that was given most of a chain; None when none was given its first link."""
        for number in range(len(links), 0, -1):
            replica = self._replica_of.get(links[number - 1])
            if replica is not None and replica in replicas:
                return Holder(replica, number)
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
