"""Threads that are there before there is work for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from carrel.process.options import OptionError

_START_SECONDS = 60.0


class NoThreads(OptionError):
    """The system starts no more threads for this process."""

    def __init__(self, count: int, name: str, error: Exception) -> None:
        super().__init__(
            f"{count} threads ({name}) cannot be started: {error}; raise the limit of processes (`ulimit -u`; TasksMax "
            "of a systemd service; `pids_limit` of a container)"
        )


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """A daemon that does the work. Raises NoThreads."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreads(1, name, error) from error
    return thread


class ReadyThreads(ThreadPoolExecutor):
    """A pool whose threads all run from the start.

    A ThreadPoolExecutor starts them as work comes. Where one cannot be started `submit` raises, but what it was given
    stays queued, without a future by which it could be cancelled or waited for: it is done once another thread comes,
    on memory that is somebody else's by then.
    """

    def __init__(
        self,
        max_workers: int,
        thread_name_prefix: str,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        """Raises NoThreads; none is left then."""
        super().__init__(max_workers, thread_name_prefix, initializer, initargs)
        # Nobody is idle before all are there, so each is started for one of these.
        there = threading.Barrier(max_workers + 1)
        try:
            for _ in range(max_workers):
                self.submit(there.wait)
            there.wait(_START_SECONDS)
        except RuntimeError as error:
            there.abort()
            self.shutdown(wait=False, cancel_futures=True)
            raise NoThreads(max_workers, thread_name_prefix, error) from error
