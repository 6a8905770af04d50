"""Whether a process that serves still answers, asked on a thread of its own: the answer may take a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from carrel.process.noted_errors import NotedErrors

ASKED_PER_TIMEOUT = 10
LEAST_PAUSE_S, MOST_PAUSE_S = 0.3, 5.0


log = logging.getLogger(__name__)


class HangWatch:
    """Calls `probe` again and again until `stop`."""

    def __init__(self, probe: Callable[[], bool], timeout_s: float) -> None:
        """timeout_s: how long the probe may fail; 0: the watch never looks."""
        self._probe = probe
        self._timeout_s = timeout_s
        self._answered_at = time.monotonic()
        self._is_stopped = threading.Event()
        if timeout_s:
            threading.Thread(target=self._run, name="hang-watch", daemon=True).start()

    @property
    def has_hung(self) -> bool:
        """Whether it has not answered for the whole time."""
        return self._timeout_s > 0 and time.monotonic() - self._answered_at > self._timeout_s

    def stop(self) -> None:
        self._is_stopped.set()

    def _run(self) -> None:
        errors = NotedErrors(log, "asking whether a process answers")
        pause = min(MOST_PAUSE_S, max(LEAST_PAUSE_S, self._timeout_s / ASKED_PER_TIMEOUT))
        while not self._is_stopped.wait(pause):
            asked_at = time.monotonic()
            with errors.noting():
                if self._probe():
                    self._answered_at = asked_at
