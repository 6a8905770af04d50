"""The start of a local Ray, which on a busy machine takes minutes: patient, reported, and tried twice."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from typing import Any

import ray
import ray._private.services
import ray._raylet
import ray.exceptions

from carrel.process.events import ProcessEvents
from kv_store.actor import NAMESPACE
from kv_store.errors import ConfigError
from kv_store.runtimes.children import end_children, ended_children

# Limit of one try.
START_SECONDS = 150.0
_TRIES = 2
_REPORT_SECONDS = 10.0
_POLL_SECONDS = 0.2
_OBJECT_STORE_BYTES = 80_000_000
# Without one of these no Ray will come.
_NEEDED = ("gcs_server", "raylet")
# Its stubs leave out what is used here.
_RAYLET: Any = ray._raylet
# Arguments of Ray's `start_raylet`, and the names of the files in which the raylet looks for these ports of its agents.
_AGENT_PORTS = {
    "metrics_agent_port": "METRICS_AGENT_PORT_NAME",
    "metrics_export_port": "METRICS_EXPORT_PORT_NAME",
    "dashboard_agent_listen_port": "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "runtime_env_agent_port": "RUNTIME_ENV_AGENT_PORT_NAME",
}
REMEDY = (
    "end other programs or give this machine more cores, and start again; python -m kv_store --runtime process needs "
    "no Ray"
)


class StartFailed(Exception):
    """Ray, or a part of it, did not start; the text says why."""


class Patience:
    """A time limit that reports how long the wait has been."""

    def __init__(
        self, events: ProcessEvents, what: str, seconds: float, report_seconds: float = _REPORT_SECONDS
    ) -> None:
        """what: name of the awaited part, such as "Ray"."""
        self._events = events
        self._what = what
        self._seconds = seconds
        self._report_seconds = report_seconds
        self._began = self._reported = time.monotonic()

    def check(self) -> None:
        """Report from time to time. Raises StartFailed when the time is over."""
        now = time.monotonic()
        if (waited := now - self._began) > self._seconds:
            raise StartFailed(f"{self._what} was not ready within {self._seconds:g} s")
        if now - self._reported >= self._report_seconds:
            self._reported = now
            self._events.status(
                f"{self._what} is still starting after {waited:.0f} s, of at most {self._seconds:g}: "
                f"the machine's load is {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
            )


def start_ray(folder: str, num_cpus: int, events: ProcessEvents) -> None:
    """Start a Ray whose files are in `folder`, and connect to it. Raises ConfigError when that fails twice."""
    events.progress("start Ray", 0, 1)
    for left in reversed(range(_TRIES)):
        try:
            _try_to_start(folder, num_cpus, Patience(events, "Ray", START_SECONDS))
            break
        except StartFailed as error:
            ray.shutdown()
            end_children(0.0)
            shutil.rmtree(folder, ignore_errors=True)
            if not left:
                raise ConfigError(
                    f"--runtime ray: the local Ray did not start, tried {_TRIES} times: {error}; {REMEDY}"
                ) from error
            events.status(f"the local Ray did not start: {error}; trying once more")
    events.progress("start Ray", 1, 1)


def _try_to_start(folder: str, num_cpus: int, patience: Patience) -> None:
    try:
        with _waiting_with(patience):
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=0,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=NAMESPACE,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
    except StartFailed:
        raise
    except Exception as exc:
        # Ray raises a bare one where a part of it is late.
        text = str(exc).strip() or type(exc).__name__
        raise StartFailed(text.splitlines()[0]) from exc


@contextlib.contextmanager
def _waiting_with(patience: Patience) -> Iterator[None]:
    """Give a starting Ray more time than two constants of its own do, which no option changes.

    Its raylet ends when its agents, two Python programs, have not written their ports to files within 15 s: here the
    ports are chosen and written beforehand, and the agents may come later. The driver waits 30 s for the raylet: here
    as long as `patience` lasts. A Ray that lacks these names keeps its own limits.
    """
    services: Any = ray._private.services
    if not all(hasattr(_RAYLET, name) for name in ("persist_port", *_AGENT_PORTS.values())):
        yield
        return
    start_raylet, get_node = services.start_raylet, services.get_node

    def start_raylet_with_ports(*places: Any, **named: Any) -> Any:
        given = inspect.signature(start_raylet).bind(*places, **named).arguments
        for argument, name in _AGENT_PORTS.items():
            given[argument] = _free_port()
            file_name = getattr(_RAYLET, name)
            _RAYLET.persist_port(given["session_dir"], given["node_id"], file_name, given[argument])
        return start_raylet(**given)

    def wait_for_node(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:
                # It has not registered yet.
                if dead := [name for name in ended_children() if name in _NEEDED]:
                    raise StartFailed(f"its process {dead[0]} ended") from None
                patience.check()
                time.sleep(_POLL_SECONDS)

    services.start_raylet, services.get_node = start_raylet_with_ports, wait_for_node
    try:
        yield
    finally:
        services.start_raylet, services.get_node = start_raylet, get_node


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])
