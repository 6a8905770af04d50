"""How long a choice waits, is prefilled and decodes, and the gaps between its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.metrics import Metrics


class Phases:
    """One choice in the worker, observed as each phase and each gap ends; what it does not end, because it fails or is
    cancelled, is not observed. Measured by one clock, the gateway's, from one event of the worker to another.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds."""
        self.first_token_at: float | None = None
        self._metrics = metrics
        self._clock = clock
        self._queued_at = 0.0
        self._begun_at: float | None = None
        self._last_token_at = 0.0
        self._num_gaps = 0

    def enter_queue(self) -> None:
        """The worker is asked; again where it had no room."""
        self._queued_at = self._clock()

    def begin_prefill(self) -> None:
        """The worker is at the prompt; once is enough."""
        if self._begun_at is None:
            self._begun_at = self._clock()
            self._metrics.queue.observe(self._begun_at - self._queued_at)

    def take_token(self) -> None:
        """A token came."""
        now = self._clock()
        if self.first_token_at is None:
            self.first_token_at = now
            begun_at = self._queued_at if self._begun_at is None else self._begun_at
            self._metrics.prefill.observe(now - begun_at)
        else:
            self._metrics.itl.observe(now - self._last_token_at)
            self._num_gaps += 1
        self._last_token_at = now

    def end(self) -> None:
        """The answer is complete."""
        if self.first_token_at is None:
            return
        self._metrics.decode.observe(self._clock() - self.first_token_at)
        if self._num_gaps:
            self._metrics.tpot.observe((self._last_token_at - self.first_token_at) / self._num_gaps)
