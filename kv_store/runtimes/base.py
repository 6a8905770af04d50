"""Where the store runs: in this process, or as an actor of a Ray of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod

from carrel.process.events import ProcessEvents
from kv_store.config import StoreConfig


class Runtime(ABC):
    """Serving when constructed, until `close`. The constructor raises ConfigError and leaves nothing then."""

    @abstractmethod
    def __init__(self, config: StoreConfig, events: ProcessEvents) -> None: ...

    @abstractmethod
    def watch(self) -> None:
        """Return soon while all is well. Raises KVStoreError when the store has died."""

    @abstractmethod
    def close(self) -> None:
        """Drain, then end every process and remove every file that this runtime made."""
