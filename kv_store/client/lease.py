"""The client's side of a lease: renewed in the background, and known to be lost without asking."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from carrel.process.noted_errors import NotedErrors
from kv_store.client.errors import StaleEpoch, StoreError, StoreUnreachable
from kv_store.client.threads import start_thread

_BEATS_PER_LEASE = 3
_BEAT_SECONDS = 0.5

logger = logging.getLogger(__name__)


class Lease:
    """Calls `beat` every `beat_seconds`, and three times a lease at least, until `close`.

    is_answered: whether a store was there when last asked, be it another start that does not know this worker.
    A store may hand this worker's slabs to others once the lease has run out, so writing needs `check`.
    """

    def __init__(
        self, lease_seconds: float, beat: Callable[[], object], beat_seconds: float = _BEAT_SECONDS
    ) -> None:
        self._seconds = lease_seconds
        self._beat_seconds = min(beat_seconds, lease_seconds / _BEATS_PER_LEASE)
        self._beat = beat
        self._valid_until = time.monotonic() + lease_seconds
        self._lost: StaleEpoch | None = None
        self.is_answered = True
        self._closing = threading.Event()
        self._errors = NotedErrors(logger, "the heartbeat to the KV store")
        self._thread = start_thread(self._run, "store-heartbeat")

    def check(self) -> None:
        """Raises StaleEpoch when the store has said so, StoreUnreachable when it was silent for a lease."""
        if self._lost is not None:
            raise StaleEpoch(str(self._lost))
        if time.monotonic() > self._valid_until:
            raise StoreUnreachable(
                f"the KV store did not answer for {self._seconds:g} s: the lease has run out"
            )

    def lose(self, error: StaleEpoch) -> None:
        """Note that the store no longer knows this attachment."""
        self._lost = error

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=self._seconds)

    def _run(self) -> None:
        while not self._closing.wait(self._beat_seconds):
            started = time.monotonic()
            try:
                self._beat()
            except StaleEpoch as exc:
                # Beats go on: whether there is a store to attach to is known by them.
                self.lose(exc)
                self.is_answered = True
            except StoreError:
                # The next beat tries again; `check` refuses once the lease has run out.
                self.is_answered = False
            except Exception as exc:
                self._errors.note(exc)
                self.is_answered = False
            else:
                self.is_answered = True
                self._valid_until = started + self._seconds
