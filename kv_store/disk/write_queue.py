"""What the disk tier has still to do, one thing after another on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from carrel.process.ready_threads import start_thread
from kv_store.disk.catalog import Chain, Unneeded
from kv_store.disk.turns import Turns

_log = logging.getLogger(__name__)

# Prefixes of no session, and sessions, that may wait to be written.
MAX_WAITING = 256
MAX_WAITING_SESSIONS = 4096
# After an error of the disk nothing is written for so long.
PAUSE_SECONDS = 60.0


class WriteQueue:
    """Sessions come before prefixes of no session, and a session's later turn replaces an earlier one; files are
    removed before anything is written, and tried again where that failed: what was dropped must not be there for the
    next store. Owners of prefixes take turns. Nobody waits for the disk: where it is behind,
    prefixes of the owner with the most are left out, and sessions that waited longest; where it has failed, all.

    Raises NoThreads. write, remove: do one thing, and may raise OSError. skipped: is told how many were left out;
    failed: of an error.
    """

    def __init__(
        self,
        write: Callable[[Chain], None],
        remove: Callable[[Unneeded], None],
        skipped: Callable[[int], None],
        failed: Callable[[OSError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._remove = remove
        self._skipped = skipped
        self._failed = failed
        self._clock = clock
        self._changed = threading.Condition()
        self._sessions: OrderedDict[str, Chain] = OrderedDict()
        self._prefixes = Turns[Chain]()
        self._unneeded: deque[Unneeded] = deque()
        self._is_busy = self._is_closing = False
        # Nothing is written before; nor removed, where that failed.
        self._resumes_at = self._removes_at = 0.0
        self._thread = start_thread(self._run, "disk-write")

    def put(self, chain: Chain) -> None:
        with self._changed:
            if self._clock() < self._resumes_at:
                self._skipped(1)
            elif chain.session:
                self._sessions[chain.session] = chain
                if len(self._sessions) > MAX_WAITING_SESSIONS:
                    self._sessions.popitem(last=False)
                    self._skipped(1)
            else:
                self._prefixes.put(chain.owner, chain)
                if len(self._prefixes) > MAX_WAITING:
                    self._prefixes.leave_one_out()
                    self._skipped(1)
            self._changed.notify_all()

    def remove(self, unneeded: Unneeded) -> None:
        if unneeded.columns or unneeded.sessions:
            with self._changed:
                self._unneeded.append(unneeded)
                self._changed.notify_all()

    def clear(self) -> None:
        """Nothing of what waits is written any more."""
        with self._changed:
            self._sessions.clear()
            self._prefixes.clear()

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until all is done, so long at most; False where it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_busy and not self._has_work, seconds)

    def close(self, seconds: float) -> None:
        """What is not done within the time never is."""
        with self._changed:
            self._removes_at = 0.0
            self._changed.notify_all()
        self.settle(seconds)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        # A disk that hangs keeps nobody from ending.
        self._thread.join(seconds)

    @property
    def _has_work(self) -> bool:
        """That may be done now."""
        return self._may_remove or bool(self._sessions or self._prefixes)

    @property
    def _may_remove(self) -> bool:
        return bool(self._unneeded) and self._clock() >= self._removes_at

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except OSError as error:
                self._pause(error)
            except Exception:
                _log.exception("a prefix is not written to the disk")
                self._skipped(1)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            while not self._has_work and not self._is_closing:
                self._changed.wait(self._removes_at - self._clock() if self._unneeded else None)
            if self._is_closing:
                return None
            self._is_busy = True
            if self._may_remove:
                unneeded = self._unneeded.popleft()
                return lambda: self._take_away(unneeded)
            chain = self._sessions.popitem(last=False)[1] if self._sessions else self._prefixes.next()
            return lambda: self._write(chain)

    def _take_away(self, unneeded: Unneeded) -> None:
        try:
            self._remove(unneeded)
        except OSError:
            with self._changed:
                self._unneeded.appendleft(unneeded)
                self._removes_at = self._clock() + PAUSE_SECONDS
            raise

    def _pause(self, error: OSError) -> None:
        with self._changed:
            num_left = len(self._sessions) + len(self._prefixes)
            self._resumes_at = self._clock() + PAUSE_SECONDS
        self.clear()
        self._skipped(1 + num_left)
        self._failed(error)
