"""How many iterations hide under prefill (PQCache 3.3)."""

from __future__ import annotations

import threading

_LEAST, _MOST = 3, 300
_SMOOTHING = 0.25


class IterationBound:
    """Learns the seconds of one iteration per token and fits as many as a layer's prefill leaves time for.

    `num_trainers` layers train at once, so a fit may take as many layer prefills. Thread-safe.
    """

    def __init__(self, default_iterations: int, num_trainers: int) -> None:
        self._default = default_iterations
        self._num_trainers = num_trainers
        self._seconds_per_token: dict[str, float] = {}
        self._lock = threading.Lock()

    def observe(self, kind: str, num_tokens: int, iterations: int, seconds: float) -> None:
        """Note a finished fit of `kind`; fits without an iteration say nothing."""
        if iterations < 1 or num_tokens < 1:
            return
        measured = seconds / iterations / num_tokens
        with self._lock:
            known = self._seconds_per_token.get(kind, measured)
            self._seconds_per_token[kind] = known + _SMOOTHING * (measured - known)

    def iterations(self, kind: str, num_tokens: int, prefill_seconds: float) -> int:
        """Iterations for a fit over `num_tokens` tokens; the default while either time is unknown (0)."""
        with self._lock:
            per_token = self._seconds_per_token.get(kind, 0.0)
        if prefill_seconds <= 0.0 or per_token <= 0.0:
            return self._default
        fitting = prefill_seconds * self._num_trainers / (per_token * num_tokens)
        return int(min(max(fitting, _LEAST), _MOST))
