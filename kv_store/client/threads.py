"""Threads of one attachment."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kv_store.client.errors import StoreUnreachable


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """A daemon that does the work. Raises StoreUnreachable where the system starts no more threads."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise StoreUnreachable(f"the KV store's client has no thread {name}: {error}") from error
    return thread
