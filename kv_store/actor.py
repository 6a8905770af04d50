"""The store as a named Ray actor: life cycle only, the work is `StoreServer`'s."""

from __future__ import annotations

import threading

from carrel.process.logs import log_to_stderr, stderr_of
from kv_store.client.errors import StoreError
from kv_store.config import StoreConfig
from kv_store.server import StoreServer

ACTOR_NAME = "kv_store"
NAMESPACE = "carrel"
# `wait` keeps one call open for the store's whole life.
MAX_CONCURRENCY = 4


class StoreActor:
    """Serves from construction on; after a restart it is empty, with a new epoch."""

    def __init__(self, config: StoreConfig, log_pid: int | None = None) -> None:
        """log_pid: the process to whose stderr this logs; None: to what Ray keeps of this one's."""
        stream = None if log_pid is None else stderr_of(log_pid)
        log_to_stderr("kv_store", config.log_level, config.log_format, stream=stream)
        self._stopped = threading.Event()
        self._server: StoreServer | None = None
        self._failure: StoreError | None = None
        try:
            self._server = StoreServer(config)
        except StoreError as exc:
            # Kept for `ready`: Ray would bury it in a text about a dead actor.
            self._failure = exc

    def ready(self) -> int:
        """The port (1 for a Unix socket) once the store serves. Raises the ConfigError that kept it from starting."""
        if self._server is None:
            raise self._failure or StoreError("the store did not start")
        return self._server.port

    def wait(self) -> None:
        """Returns when the store has been stopped; fails when its process dies."""
        self._stopped.wait()

    def stop(self) -> None:
        """Drain and give everything back."""
        if self._server is not None:
            self._server.close()
        self._stopped.set()
