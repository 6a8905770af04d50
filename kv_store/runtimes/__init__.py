"""Where the store runs: in this process, or as an actor of a Ray of its own."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from carrel.process.events import ProcessEvents
from kv_store.config import StoreConfig
from kv_store.memory import check_room


class Runtime(ABC):
    """Serving when constructed, until `close`. The constructor raises ConfigError and leaves nothing then."""

    @abstractmethod
    def __init__(self, config: StoreConfig, events: ProcessEvents) -> None: ...

    @abstractmethod
    def watch(self) -> None:
        """Return soon while all is well. Raises StoreError when the store has died."""

    @abstractmethod
    def close(self) -> None:
        """Drain, then end every process and remove every file that this runtime made."""

    def abandon(self) -> None:
        """The same at once: whoever used the store is gone."""
        self.close()


class ProcessRuntime(Runtime):
    """The store in this process, trainers as threads. Nothing can die but the process itself."""

    def __init__(self, config: StoreConfig, events: ProcessEvents) -> None:
        # Imported late: help and a refused option do not need FAISS.
        from kv_store.server import StoreServer

        check_room(config.arena_bytes, config.slab_bytes)
        events.progress("map the arena", 0, 1)
        self._server = StoreServer(config)
        events.progress("map the arena", 1, 1)

    def watch(self) -> None:
        """The server lives as long as this process."""

    def close(self) -> None:
        self._server.close()


def load_runtime(name: str) -> type[Runtime]:
    """The class of this name, as the option --runtime names it; imports Ray where it is needed."""
    if name == "process":
        return ProcessRuntime
    # Ray reads these when it is imported.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    # By default 15: requests that wait for the store would wait for every other process of the machine.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's own spelling)
    # By default Ray kills what it runs when 95 % of the memory is in use, which an arena is there to do.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 (Ray's own spelling)
    # By default 512 MiB, and five older ones, of each of its processes: a container keeps them in memory.
    os.environ["RAY_ROTATION_MAX_BYTES"] = str(256 << 10)
    os.environ["RAY_ROTATION_BACKUP_COUNT"] = "1"
    # The connection to Ray would wait for workers that no actor has asked for.
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    # By default 20, 60 and 30 seconds, too short where many other programs run.
    os.environ["RAY_gcs_server_port_wait_time_s"] = "150"  # noqa: SIM112
    os.environ["RAY_worker_register_timeout_seconds"] = "150"  # noqa: SIM112
    os.environ["RAY_agent_register_timeout_ms"] = "150000"  # noqa: SIM112
    # Without clusters Ray uses the loopback address; with them it replaces 127.0.0.1 by an outside one.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from kv_store.runtimes.ray_local import RayRuntime

    return RayRuntime
