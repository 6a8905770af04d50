"""What the host does for the KV cache, and how long that takes. Of what kernels do by themselves it knows nothing."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator

from carrel.process.histogram import Histogram

# Of a share in [0, 1].
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)


class Stall(enum.Enum):
    """What decoding waits for: rows, within a step whose host asks the store, or moves them itself; an index. The
    engine adds how long it waits for a silent store."""

    ROWS = "rows"
    INDEX = "index"


class Fallback(enum.Enum):
    """What was done in place of what should have been: a known prefix was lost, and computed; a request whose rows are
    all on the device left a silent store; rows go through the host, since CUDA does not register the arena."""

    RECOMPUTE = "recompute"
    WITHOUT_STORE = "without_store"
    THROUGH_HOST = "through_host"


class KVMeter:
    """For the engine's thread.

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
        """The host waits for the store, or moves rows in its place."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._waited_seconds += time.perf_counter() - begun

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A decode step, which stalls as long as the host waits within it."""
        before = self._waited_seconds
        yield
        if self._waited_seconds > before:
            self.stalls[Stall.ROWS].observe(self._waited_seconds - before)

    def clear(self) -> None:
        """Count from zero again, but fallbacks: there is none that does not matter."""
        for each in (self.search, self.gather, self.copy, self.offload, self.attended, *self.stalls.values()):
            each.clear()
