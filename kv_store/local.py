"""A store inside the current process, on Unix sockets in a folder of its own: for tests and small tools."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from carrel.process.tracing import Tracer
from kv_store.config import StoreConfig
from kv_store.disk.folder import TierFolder, take_folder
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
        disk: Path | None = None,
        disk_bytes: int = 1 << 30,
        take_folder: Callable[[Path], TierFolder] = take_folder,
        tracer: Tracer | None = None,
    ) -> None:
        """tracer, take_folder: as `StoreServer` has them."""
        self._tracer, self._take_folder = tracer, take_folder
        self._folder = tempfile.TemporaryDirectory(prefix="carrel-store-")
        try:
            self.config = StoreConfig(
                listen=f"unix:{self._folder.name}/kv_store.sock",
                arena_bytes=arena_bytes,
                slab_bytes=slab_bytes,
                num_trainers=num_trainers,
                runtime="process",
                lease_seconds=lease_seconds,
                kv_store_path=disk,
                kv_store_disk_bytes=disk_bytes,
            )
            self.server = StoreServer(self.config, self._tracer, self._take_folder)
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def target(self) -> str:
        return self.config.listen

    def restart(self) -> None:
        """Stop and start at the same address: with a new epoch, and nothing but what is on the disk."""
        self.server.close()
        self.server = StoreServer(self.config, self._tracer, self._take_folder)

    def close(self) -> None:
        self.server.close()
        self._folder.cleanup()

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
