"""Requests that need a store which is silent, or reads what they need from its disk: who waits for it, and for how
long."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from carrel.process.histogram import Histogram
from gpu_worker.errors import StoreUnavailable
from gpu_worker.state.sequence import Sequence, Status

PATIENCE_SECONDS = 10.0
# Between two looks at what the store reads from its disk.
LOOK_SECONDS = 0.05


class Patience:
    """Nothing is tried for those that wait while the store is silent: everyone else goes on meanwhile."""

    def __init__(
        self,
        seconds: float,
        silent_seconds: Callable[[], float],
        stalls: Histogram,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds: that a request waits for the store. silent_seconds: how long it has been silent by now. stalls: of
        those who decode, the seconds that each waited."""
        self._seconds = seconds
        self._silent_seconds = silent_seconds
        self._stalls = stalls
        self._clock = clock
        self._since: dict[Sequence, float] = {}
        # When those that wait for the store's disk are looked at next: the store ends that wait.
        self._looks_at: dict[Sequence, float] = {}

    @property
    def held(self) -> Collection[Sequence]:
        """Who need not be tried now."""
        silent = self._since.keys() if self._since and self._silent_seconds() else ()
        return {*silent, *filter(self.looks_later, self._looks_at)} if self._looks_at else silent

    def held_with(self, others: Collection[Sequence]) -> set[Sequence]:
        """These, and who need not be tried now."""
        return {*self.held, *others}

    def look_later(self, sequence: Sequence) -> None:
        """What it needs comes from the store's disk."""
        self._looks_at[sequence] = self._clock() + LOOK_SECONDS

    def looks_later(self, sequence: Sequence) -> bool:
        return self._clock() < self._looks_at.get(sequence, 0.0)

    def wait(self, sequence: Sequence) -> None:
        """It needs the store, which is silent."""
        self._since.setdefault(sequence, self._clock())

    def end(self, sequence: Sequence) -> None:
        """The store has answered it, or it has ended; one that did not wait is no error."""
        since = self._since.pop(sequence, None)
        if since is not None and sequence.status is Status.DECODE:
            self._stalls.observe(self._clock() - since)
        self._looks_at.pop(sequence, None)

    def note(self, waiting: Collection[Sequence], others: Collection[Sequence]) -> None:
        """Some need the store, which is silent, and others not, or no more."""
        for sequence in others:
            self.end(sequence)
        for sequence in waiting:
            self.wait(sequence)

    def note_all(self, sequences: Collection[Sequence]) -> None:
        """All of these need the store: they wait as long as it is silent."""
        if self._silent_seconds():
            self.note(sequences, ())
        else:
            self.note((), sequences)

    def over(self) -> list[Sequence]:
        """Those who waited for so long; all, if the store has been silent for so long."""
        if self._since and self._silent_seconds() >= self._seconds:
            return list(self._since)
        now = self._clock()
        return [sequence for sequence, since in self._since.items() if now - since >= self._seconds]

    def error(self) -> StoreUnavailable:
        """What those end with."""
        return StoreUnavailable(
            f"the KV store, which the request needs, did not answer for {self._seconds:g} s"
        )
