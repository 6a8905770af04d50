"""Decides how long requests wait for a store that is silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from carrel.process.histogram import Histogram
from gpu_worker.engine.request import Request, Status
from gpu_worker.errors import StoreUnavailable

PATIENCE_SECONDS = 10.0
# Between two looks at what the store reads from its disk.
LOOK_SECONDS = 0.05


class Patience:
    """Remembers the requests that wait for the store: nothing is tried for them, and every other request continues.

    stalls: seconds that each decoding request waited.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """seconds: that a request waits for the store."""
        self._seconds = seconds
        self._clock = clock
        self.stalls = Histogram()
        self._since: dict[Request, float] = {}
        # When requests that wait for the store's disk are looked at next: the store ends that wait.
        self._looks_at: dict[Request, float] = {}

    def held(self, silent_seconds: float) -> Collection[Request]:
        """Return the requests that need not be tried now. silent_seconds: how long the store has been silent."""
        silent = self._since.keys() if self._since and silent_seconds else ()
        return {*silent, *filter(self.looks_later, self._looks_at)} if self._looks_at else silent

    def look_later(self, request: Request) -> None:
        """Hold a request a moment: the store reads its rows from disk."""
        self._looks_at[request] = self._clock() + LOOK_SECONDS

    def looks_later(self, request: Request) -> bool:
        return self._clock() < self._looks_at.get(request, 0.0)

    def wait(self, request: Request) -> None:
        """Hold a request that needs the store, which is silent."""
        self._since.setdefault(request, self._clock())

    def end(self, request: Request) -> None:
        """The store has answered it, or it has ended; one that did not wait is no error."""
        since = self._since.pop(request, None)
        if since is not None and request.status is Status.DECODE:
            self.stalls.observe(self._clock() - since)
        self._looks_at.pop(request, None)

    def note(self, waiting: Collection[Request], others: Collection[Request]) -> None:
        """Hold some requests, and no longer the others."""
        for request in others:
            self.end(request)
        for request in waiting:
            self.wait(request)

    def note_all(self, requests: Collection[Request], silent_seconds: float) -> None:
        """Hold all of these, which need the store, while it is silent."""
        if silent_seconds:
            self.note(requests, ())
        else:
            self.note((), requests)

    def over(self, silent_seconds: float) -> list[Request]:
        """Return the requests that waited for too long; all, if the store has been silent for so long."""
        if self._since and silent_seconds >= self._seconds:
            return list(self._since)
        now = self._clock()
        return [request for request, since in self._since.items() if now - since >= self._seconds]

    def error(self) -> StoreUnavailable:
        """Return the error of a request that waited for too long."""
        return StoreUnavailable(
            f"the KV store, which the request needs, did not answer for {self._seconds:g} s"
        )
