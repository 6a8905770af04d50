"""Ended sequences, reported to the store in the background."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import TypeVar

from carrel.process import ready_threads
from carrel.process.noted_errors import NotedErrors
from kv_store.client.errors import StaleEpoch, StoreError, StoreFull, StoreSilent, StoreUnreachable


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """A daemon that does the work. Raises StoreUnreachable where the system starts no more threads."""
    try:
        return ready_threads.start_thread(work, name)
    except ready_threads.NoThreads as error:
        raise StoreUnreachable(f"the KV store's client has no thread {name}: {error.__cause__}") from error


# Between two tries.
_RETRY_SECONDS = 0.05
_MAX_AT_ONCE = 64
# Of all that are told at once: a store takes 16 MiB, and each has some 34 bytes.
_MAX_HASHES_AT_ONCE = 400_000

Reply = TypeVar("Reply")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """How one sequence ends.

    num_tokens: sealed before, in all layers; 0: nothing is. prefix_hashes and session: as for `StoreClient.seal`.
    keeps_prefix: only its own slabs are given up; it stays, with what it shares.
    """

    sequence_id: str
    num_tokens: int = 0
    prefix_hashes: tuple[bytes, ...] = ()
    session_id: str = ""
    session_label: str = ""
    keeps_prefix: bool = False


class Ends:
    """Calls `tell` with ends in their order, on a thread of its own, as many at once as there are by then.

    What could not be told for want of an answer is told again, until the store answers or has lost it all. A store
    that does not answer begins nothing, so no more ever wait than were begun before.
    """

    def __init__(self, tell: Callable[[Sequence[SequenceEnd]], None], seconds: float) -> None:
        """seconds: that a wait for what is told may take."""
        self._tell = tell
        self._seconds = seconds
        # Those that are being told come first.
        self._waiting: deque[SequenceEnd] = deque()
        self._changed = threading.Condition()
        # Why the first of them are still here, after a try.
        self._failure: StoreUnreachable | None = None
        self._is_closing = False
        self._errors = NotedErrors(logger, "telling the KV store what has ended")
        start_thread(self._run, "store-ends")

    def put(self, end: SequenceEnd) -> None:
        """Returns at once."""
        with self._changed:
            if end not in self._waiting:
                self._waiting.append(end)
            self._changed.notify_all()

    def settle_for(self, sequence_id: str, prefix_hashes: Collection[bytes]) -> None:
        """Wait where a sequence of this name, or with such a prefix, would find another store once all is told. Raises
        as `settle` does."""
        with self._changed:
            waiting = tuple(self._waiting)
        names = set(prefix_hashes) if waiting else set()
        if any(each.sequence_id == sequence_id or names.intersection(each.prefix_hashes) for each in waiting):
            self.settle()

    def with_all_room(self, ask: Callable[[], Reply]) -> Reply:
        """Its reply; asked again where it raises StoreFull and the room of what has ended may come yet."""
        is_incomplete = bool(self._waiting)
        try:
            return ask()
        except StoreFull:
            if not is_incomplete:
                raise
        self.settle()
        return ask()

    def settle(self) -> None:
        """Wait until all that was put by now is told. Raises StoreUnreachable, or
        StoreSilent, where a try failed or takes too long."""
        with self._changed:
            if not self._waiting:
                return
            last, until = self._waiting[-1], time.monotonic() + self._seconds
            while last in self._waiting:
                if self._failure is not None:
                    raise type(self._failure)(self._failure.text)
                if not self._changed.wait(until - time.monotonic()):
                    raise StoreSilent("the KV store was not told in time what has ended")

    def close(self, is_drained: bool) -> None:
        """is_drained: tell what is left first, if the store answers in time."""
        with contextlib.suppress(StoreError):
            if is_drained:
                self.settle()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            failure = self._try(batch)
            with self._changed:
                self._failure = failure
                if failure is None:
                    for _ in batch:
                        self._waiting.popleft()
                self._changed.notify_all()
                if failure is not None and not self._is_closing:
                    self._changed.wait(_RETRY_SECONDS)

    def _next(self) -> list[SequenceEnd] | None:
        with self._changed:
            while not self._waiting and not self._is_closing:
                self._changed.wait()
            return None if self._is_closing else self._first()

    def _first(self) -> list[SequenceEnd]:
        """As many as one call has room for."""
        num_hashes = accumulate(len(each.prefix_hashes) for each in self._waiting)
        num_fitting = sum(1 for _ in takewhile(_MAX_HASHES_AT_ONCE.__ge__, num_hashes))
        return list(self._waiting)[: min(max(1, num_fitting), _MAX_AT_ONCE)]

    def _try(self, batch: Sequence[SequenceEnd]) -> StoreUnreachable | None:
        """None where there is nothing left to tell of these."""
        try:
            self._tell(batch)
        except StoreUnreachable as error:
            return error
        except StaleEpoch:
            # What they held went with the lease.
            pass
        except StoreError as error:
            logger.warning("the KV store refused how sequences end: %s", error)
        except Exception as error:
            self._errors.note(error)
            return StoreUnreachable(f"the KV store could not be told what has ended: {error}")
        return None
