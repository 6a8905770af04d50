"""Times of the host's work for the KV cache. Work that kernels do by themselves is not counted."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator

from carrel.process.histogram import Histogram

# Of a share in [0, 1].
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)


class Stall(enum.Enum):
    """Causes for which decoding waits.

    ROWS: the host asks the store for rows within a step, or moves them itself. INDEX: an index is being trained. The
    engine adds the time that it waits for a silent store.
    """

    ROWS = "rows"
    INDEX = "index"


class Fallback(enum.Enum):
    """Slower ways that were taken.

    RECOMPUTE: a known prefix was lost, and is computed. WITHOUT_STORE: a request left a silent store, since all its
    rows are on the device. THROUGH_HOST: rows pass through the host, since CUDA does not register the arena.
    """

    RECOMPUTE = "recompute"
    WITHOUT_STORE = "without_store"
    THROUGH_HOST = "through_host"


class KVMeter:
    """Histograms and counters of the engine's thread.

    search: of one layer, for requests that decode together. gather: rows of a layer, to host memory. copy: of these, to
    the device. offload: of a prompt's layer, a short prompt, or a decoded token, to the arena. attended: the share of
    its context that a request's steps attended, in the mean.
    """

    def __init__(self) -> None:
        self.search = Histogram()
        self.gather = Histogram()
        self.copy = Histogram()
        self.offload = Histogram()
        self.attended = Histogram(SHARES)
        self.stalls = {cause: Histogram() for cause in Stall}
        self.fallbacks = dict.fromkeys(Fallback, 0)
        self._waited_seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a block in which the host waits for the store, or moves rows in its place."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._waited_seconds += time.perf_counter() - begun

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a decode step, which stalls as long as the host waits within it."""
        before = self._waited_seconds
        yield
        if self._waited_seconds > before:
            self.stalls[Stall.ROWS].observe(self._waited_seconds - before)

    def clear(self) -> None:
        """Count from zero again, except fallbacks, each of which matters."""
        for each in (self.search, self.gather, self.copy, self.offload, self.attended, *self.stalls.values()):
            each.clear()
