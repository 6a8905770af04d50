"""Runtimes by name."""

from __future__ import annotations

import os
from collections.abc import Callable

from kv_store.runtimes.base import Runtime

__all__ = ["Runtime", "load_runtime"]


def _process() -> type[Runtime]:
    from kv_store.runtimes.process import ProcessRuntime

    return ProcessRuntime


def _ray() -> type[Runtime]:
    # Ray reads these when it is imported.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    # Without clusters Ray uses the loopback address; with them it replaces 127.0.0.1 by an outside one.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from kv_store.runtimes.ray_local import RayRuntime

    return RayRuntime


_LOADERS: dict[str, Callable[[], type[Runtime]]] = {"process": _process, "ray": _ray}


def load_runtime(name: str) -> type[Runtime]:
    """The class of this name, as the option --runtime names it; imports what it needs."""
    return _LOADERS[name]()
