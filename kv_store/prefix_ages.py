"""How long ago slabs that are listed were used, and how long they stayed: whether the arena is large enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from carrel.process.histogram import Histogram

# in seconds: from a chat's next turn to a week
BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0)


class PrefixAges:
    """Under the store's lock.

    reuse_gap: since the last use of what a prompt shares, of the last slabs that it does. evicted_idle,
    evicted_lifetime: of what was given up for room, since its last use, and since it was listed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._listed_at: dict[bytes, float] = {}
        self._used_at: dict[bytes, float] = {}
        self.reuse_gap = Histogram(BOUNDS)
        self.evicted_idle = Histogram(BOUNDS)
        self.evicted_lifetime = Histogram(BOUNDS)

    def note_listed(self, names: Sequence[bytes]) -> None:
        """These were listed, of which some may have been before."""
        now = self._clock()
        for name in names:
            self._listed_at.setdefault(name, now)
            self._used_at[name] = now

    def note_used(self, names: Sequence[bytes]) -> None:
        """A prompt shares the slabs of these, all of them listed."""
        now = self._clock()
        self.reuse_gap.observe(now - self._used_at[names[-1]])
        self._used_at.update(dict.fromkeys(names, now))

    def note_evicted(self, names: Collection[bytes]) -> None:
        """These are given up for room."""
        now = self._clock()
        for name in names:
            self.evicted_idle.observe(now - self._used_at[name])
            self.evicted_lifetime.observe(now - self._listed_at[name])

    def forget(self, names: Collection[bytes]) -> None:
        """These are listed no more."""
        for name in names:
            del self._listed_at[name], self._used_at[name]
