"""A store inside the current process, on Unix sockets in a folder of its own: for tests and small tools."""

from __future__ import annotations

import tempfile
from types import TracebackType

from kv_store.config import StoreConfig
from kv_store.server import StoreServer


class LocalStore:
    """Serves while the `with` block runs; `target` is what `StoreClient.connect` takes.

    Raises ConfigError as `StoreServer` does.
    """

    def __init__(
        self,
        arena_bytes: int = 64 << 20,
        *,
        slab_bytes: int = 2 << 20,
        num_trainers: int = 1,
        lease_seconds: float = 30.0,
        verify_reads: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="carrel-store-")
        try:
            self.config = StoreConfig(
                listen=f"unix:{self._folder.name}/kv_store.sock",
                arena_bytes=arena_bytes,
                slab_bytes=slab_bytes,
                num_trainers=num_trainers,
                runtime="process",
                lease_seconds=lease_seconds,
                verify_reads=verify_reads,
            )
            self.server = StoreServer(self.config)
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def target(self) -> str:
        return self.config.listen

    def restart(self) -> None:
        """Stop and start at the same address: empty, with a new epoch."""
        self.server.close()
        self.server = StoreServer(self.config)

    def close(self) -> None:
        self.server.close()
        self._folder.cleanup()

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
