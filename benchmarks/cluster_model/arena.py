"""The host memory of one replica: rows of live requests, and prefixes that are kept while there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Kept:
    num_tokens: int
    num_leases: int


class Arena:
    """Counts tokens. A prefix is stored once, however many use it; unused ones are evicted, the oldest first.

    dropped: told the number of each prefix that had to go.
    """

    def __init__(self, capacity: int, dropped: Callable[[int], None]) -> None:
        self.capacity = capacity
        self._dropped = dropped
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        # tokens of live requests; of kept prefixes; of those that live requests use
        self._own = 0
        self._stored = 0
        self._leased = 0

    @property
    def leased(self) -> int:
        """Tokens that live requests hold."""
        return self._own + self._leased

    @property
    def used(self) -> int:
        """All tokens there are."""
        return self._own + self._stored

    def holds(self, prefix: int) -> bool:
        return prefix in self._kept

    def keep(self, prefix: int, num_tokens: int) -> bool:
        """Store an unused prefix, if there is room without dropping another."""
        if prefix in self._kept or self.used + num_tokens > self.capacity:
            return False
        self._kept[prefix] = _Kept(num_tokens, 0)
        self._stored += num_tokens
        return True

    def take(self, num_own: int, prefix: int, num_prefix: int) -> bool:
        """Room for a request's own tokens, and for its prefix (-1: none); False when there is none."""
        kept = self._kept.get(prefix)
        added = num_own + (num_prefix if prefix >= 0 and kept is None else 0)
        newly_leased = num_prefix if prefix >= 0 and (kept is None or not kept.num_leases) else 0
        if self.leased + num_own + newly_leased > self.capacity:
            return False
        if prefix >= 0:
            if kept is None:
                kept = self._kept[prefix] = _Kept(num_prefix, 0)
                self._stored += num_prefix
            kept.num_leases += 1
            self._leased += newly_leased
            self._kept.move_to_end(prefix)
        self._own += num_own
        if added:
            self._drop_oldest()
        return True

    def release(self, num_own: int, prefix: int) -> None:
        self._own -= num_own
        if prefix >= 0:
            kept = self._kept[prefix]
            kept.num_leases -= 1
            if not kept.num_leases:
                self._leased -= kept.num_tokens

    def _drop_oldest(self) -> None:
        while self.used > self.capacity:
            prefix = next(number for number, kept in self._kept.items() if not kept.num_leases)
            self._stored -= self._kept.pop(prefix).num_tokens
            self._dropped(prefix)
