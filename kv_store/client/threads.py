"""Threads of one attachment."""

from __future__ import annotations

import threading
from collections.abc import Callable

from carrel.process import ready_threads
from kv_store.client.errors import StoreUnreachable


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """A daemon that does the work. Raises StoreUnreachable where the system starts no more threads."""
    try:
        return ready_threads.start_thread(work, name)
    except ready_threads.NoThreads as error:
        raise StoreUnreachable(f"the KV store's client has no thread {name}: {error.__cause__}") from error
