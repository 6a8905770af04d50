"""How values are distributed: counted by bounds, as Prometheus has them."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

# of seconds: from the selection of one layer to a wait for an index
SECONDS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """counts: of values that were at most each of `bounds`, which ascend, and above the one before; then of those above
    all. sum: of all values."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    sum: float = 0.0


NOTHING = Distribution()


class Histogram:
    """Counts values. For one thread at a time."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self.clear()

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the seconds that a block takes; not those of one that raises."""
        begun = time.perf_counter()
        yield
        self.observe(time.perf_counter() - begun)

    def read(self) -> Distribution:
        """Return the distribution of all values since the start, or since `clear`."""
        return Distribution(self._bounds, tuple(self._counts), self._sum)

    def clear(self) -> None:
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
