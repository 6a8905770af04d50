"""Checks of the host: the arena's memory, shared memory, ports, and what a Ray has left."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from carrel.doctor.finding import GIB, Finding, Start, State
from carrel.doctor.programs import run_python
from carrel.errors import PortInUseError
from carrel.machine import file_text
from carrel.process.command_line import arguments
from gateway.listener import tcp_socket
from kv_store.config import StoreConfig

STORE_CHECK = "kv_store.check"
# Ray's object store, which never holds the KV cache; below that Ray takes a slower folder
OBJECT_STORE_BYTES = 80_000_000
CONNECT_TIMEOUT_S = 1.0


def check_host(start: Start) -> Iterator[Finding]:
    yield check_arena(start)
    yield check_shared_memory(Path("/dev/shm"))
    options = start.options
    ports = {"--port": options.port if options.uds is None else None, "--grpc-port": options.grpc_port}
    for flag, port in ports.items():
        if port:
            yield check_port(options.host, port, flag)
    yield check_ray(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray")


def check_arena(start: Start) -> Finding:
    """Check the store's options and its memory, by the program that `carrel serve` runs for that."""
    texts = {**start.resolved.texts, "listen": "unix:/tmp/kv_store.sock", "runtime": "process"}
    ended = run_python("-m", STORE_CHECK, *arguments(StoreConfig, texts))
    if ended.timed_out:
        return Finding(State.WARNING, "host memory", ended.error, "try again on an idle machine")
    if ended.code:
        text, _, remedy = ended.error.removeprefix("kv_store: ").partition("; ")
        return Finding(State.PROBLEM, "host memory", text, remedy)
    return Finding(State.OK, "host memory", f"an arena of {start.arena_bytes / GIB:.2f} GiB fits")


def check_shared_memory(folder: Path) -> Finding:
    """Check the space of Ray's object store; the arena itself needs none there."""
    if not folder.is_dir():
        return Finding(
            State.WARNING, "shared memory", f"there is no {folder}", "mount a tmpfs of 96 MB there"
        )
    free = shutil.disk_usage(folder).free
    text = f"{folder}: {free / 1e6:,.0f} MB are free"
    if free < OBJECT_STORE_BYTES:
        return Finding(State.WARNING, "shared memory", text, "Ray needs 80 MB: docker run --shm-size 96m")
    return Finding(State.OK, "shared memory", text)


def check_port(host: str, port: int, flag: str) -> Finding:
    """Check that a server could listen there. flag: the option that names the port."""
    try:
        tcp_socket(host, port).close()
    except OSError as error:
        text, _, remedy = str(PortInUseError(host, port, flag, error.strerror or str(error))).partition("; ")
        return Finding(State.PROBLEM, f"port {port}", text, remedy)
    return Finding(State.OK, f"port {port}", f"free on {host}")


def check_ray(folder: Path) -> Finding:
    """Check for the address of a Ray cluster that has ended without `ray stop`: `carrel deploy` would wait for it."""
    address = file_text(str(folder / "ray_current_cluster"))
    if not address:
        return Finding(State.OK, "ray", f"no cluster of this machine in {folder}")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        text = f"{folder} names a cluster at {address}, which does not answer"
        return Finding(
            State.WARNING, "ray", text, f"rm {folder}/ray_current_cluster, or start that cluster again"
        )
    return Finding(State.OK, "ray", f"a cluster runs at {address}")
