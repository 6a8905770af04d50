"""The store in this process, trainers as threads."""

from __future__ import annotations

from carrel.process.events import ProcessEvents
from kv_store.config import StoreConfig
from kv_store.memory import check_room
from kv_store.runtimes.base import Runtime
from kv_store.server import StoreServer


class ProcessRuntime(Runtime):
    """Nothing can die but the process itself."""

    def __init__(self, config: StoreConfig, events: ProcessEvents) -> None:
        check_room(config.arena_bytes, config.slab_bytes)
        events.progress("map the arena", 0, 1)
        self._server = StoreServer(config)
        events.progress("map the arena", 1, 1)

    def watch(self) -> None:
        """The server lives as long as this process."""

    def close(self) -> None:
        self._server.close()
