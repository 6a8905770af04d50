"""When a process is started again: how often and how soon after it died, and after how long without an answer."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from carrel.process.noted_errors import NotedErrors

DEFAULT_LIMIT = 5
# of a hang watch
POLLS_PER_TIMEOUT = 10
LEAST_PAUSE_S, MOST_PAUSE_S = 0.3, 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestartPolicy:
    """At most `limit` restarts of one process within `window_s`; the pause before each is twice the last one's, and
    `max_delay_s` at most."""

    limit: int = DEFAULT_LIMIT
    window_s: float = 600.0
    first_delay_s: float = 1.0
    max_delay_s: float = 30.0

    def grant(self, deaths: deque[float], now: float) -> float | None:
        """Return the pause before the restart of a process that died now, in seconds; None when no restart is left.

        deaths: when it died before, oldest first. Holds the deaths within the window afterwards, `now` too where a
        restart is granted.
        """
        while deaths and now - deaths[0] >= self.window_s:
            deaths.popleft()
        if len(deaths) >= self.limit:
            return None
        deaths.append(now)
        return min(self.first_delay_s * 2 ** (len(deaths) - 1), self.max_delay_s)


class HangWatch:
    """Polls a process that serves, and finds when it has hung. Judges right after a poll only: a supervisor that was
    stopped for a while takes no process for one that hangs."""

    def __init__(
        self, probe: Callable[[], bool], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """timeout_s: how long the probe may fail; 0: it is never called."""
        self._probe = probe
        self._timeout_s = timeout_s
        self._clock = clock
        self._polled_at = self._answered_at = clock()
        self._pause_s = min(MOST_PAUSE_S, max(LEAST_PAUSE_S, timeout_s / POLLS_PER_TIMEOUT))
        self._errors = NotedErrors(log, "polling a process")

    def has_hung(self) -> bool:
        """Poll when it is time, and return whether the process has not answered for the whole timeout."""
        now = self._clock()
        if not self._timeout_s or now - self._polled_at < self._pause_s:
            return False
        self._polled_at = now
        with self._errors.noting():
            if self._probe():
                self._answered_at = now
        return now - self._answered_at > self._timeout_s
