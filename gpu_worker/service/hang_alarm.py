"""Ends the process when its engine hangs."""

from __future__ import annotations

import faulthandler
import logging
import time

from carrel.process.noted_errors import NotedErrors

logger = logging.getLogger(__name__)

# Arming starts a thread: not at every step.
ARM_SECONDS = 1.0


class HangAlarm:
    """From `start` to `close`: once `reset` was not called for `seconds`, the process ends with 1, and every thread's
    stack goes to stderr.

    faulthandler does it, from a thread that needs no lock of the interpreter: native code may hold that while it hangs.
    A process has one alarm at most. seconds 0: none.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pause = min(ARM_SECONDS, seconds / 4)
        self._armed_at = float("-inf")
        self._is_on = False
        self._errors = NotedErrors(logger, "arming the alarm for an engine that hangs")

    def start(self) -> None:
        """Progress is expected from now on."""
        self._is_on = self._seconds > 0
        self.reset()

    def reset(self) -> None:
        """The engine makes progress; any thread."""
        now = time.monotonic()
        if self._is_on and now - self._armed_at >= self._pause:
            self._armed_at = now
            # Where no thread can be started there is no alarm until a later one arms it.
            with self._errors.noting():
                # Never early, though the latest resets did not arm it.
                faulthandler.dump_traceback_later(self._seconds + self._pause, exit=True)

    def close(self) -> None:
        """No progress is expected any more."""
        if self._is_on:
            self._is_on = False
            faulthandler.cancel_dump_traceback_later()
