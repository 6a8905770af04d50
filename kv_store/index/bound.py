"""How much fitting hides under prefill (PQCache 3.3): iterations, and where the fewest take too long, points."""

from __future__ import annotations

import threading
from dataclasses import dataclass

_LEAST, _MOST = 3, 300
_SMOOTHING = 0.25
# Of the points that a fit may have. Of its recall half of them cost 0.013 (0.446 to 0.433: carrel-nano, 8K tokens).
_LEAST_SHARE = 0.5
# Of what the trainers can do while a layer is computed. The rest is for what prefill itself asks of the cores, and
# keeps the wait for the last layer, which nothing hides where the store trains it, to half of a layer's time.
_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class FitCost:
    """The cost of one fit of all heads: seconds of one core, all of them and those within iterations.

    num_tokens: all rows, which are read and assigned once. num_points: those that an iteration goes over.
    """

    num_tokens: int
    num_points: int
    iterations: int
    seconds: float
    iterating_seconds: float


@dataclass(frozen=True, slots=True)
class Effort:
    """The work that a fit is granted. share: of the points that it may have."""

    iterations: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class _Rates:
    """Seconds for a token beside the iterations, and for a point of an iteration."""

    per_token: float
    per_point: float


class IterationBound:
    """Learns what a fit costs and grants as much as a layer's prefill leaves time for. Thread-safe."""

    def __init__(self, default_iterations: int, num_trainers: int) -> None:
        self._default = default_iterations
        self._num_trainers = num_trainers
        self._rates: dict[str, _Rates] = {}
        self._lock = threading.Lock()

    def observe(self, kind: str, cost: FitCost) -> None:
        """Note a finished fit of `kind`; one without an iteration says nothing."""
        if cost.iterations < 1 or cost.num_points < 1:
            return
        beside = max(0.0, cost.seconds - cost.iterating_seconds) / cost.num_tokens
        within = cost.iterating_seconds / cost.iterations / cost.num_points
        with self._lock:
            known = self._rates.get(kind, _Rates(beside, within))
            self._rates[kind] = _Rates(
                known.per_token + _SMOOTHING * (beside - known.per_token),
                known.per_point + _SMOOTHING * (within - known.per_point),
            )

    def effort(self, kind: str, num_tokens: int, num_points: int, prefill_seconds: float) -> Effort:
        """For such a fit; the default iterations while what they cost or the prefill's time is unknown (0)."""
        with self._lock:
            rates = self._rates.get(kind)
        if rates is None or prefill_seconds <= 0.0 or rates.per_point <= 0.0:
            return Effort(self._default)
        left = _SHARE * prefill_seconds * self._num_trainers - rates.per_token * num_tokens
        fitting = left / (rates.per_point * num_points)
        if fitting < _LEAST:
            return Effort(_LEAST, max(_LEAST_SHARE, fitting / _LEAST))
        return Effort(int(min(fitting, _MOST)))
