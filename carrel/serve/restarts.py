"""How often and how soon a process that died is started again."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_LIMIT = 5


@dataclass(frozen=True)
class RestartPolicy:
    """At most `limit` restarts of one process within `window_s`; the pause before each is twice the last one's, and
    `max_delay_s` at most."""

    limit: int = DEFAULT_LIMIT
    window_s: float = 600.0
    first_delay_s: float = 1.0
    max_delay_s: float = 30.0


@dataclass(frozen=True)
class Restart:
    """The `number`-th restart within the window, to be made `delay_s` after the death."""

    number: int
    delay_s: float


class Restarts:
    """Counts restarts, each process on its own."""

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self._clock = clock
        self._deaths: dict[str, deque[float]] = defaultdict(deque)

    def grant(self, child: str) -> Restart | None:
        """The restart after a death that happened now; None when no restart is left."""
        deaths, now = self._deaths[child], self._clock()
        while deaths and now - deaths[0] >= self.policy.window_s:
            deaths.popleft()
        if len(deaths) >= self.policy.limit:
            return None
        deaths.append(now)
        delay_s = self.policy.first_delay_s * 2 ** (len(deaths) - 1)
        return Restart(len(deaths), min(delay_s, self.policy.max_delay_s))
