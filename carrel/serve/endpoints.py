"""Addresses of one box: sockets in a private folder, and ports that are held before anything is loaded."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from carrel.errors import PortInUseError
from gateway.listener import tcp_socket


@dataclass(frozen=True)
class Endpoints:
    """Where everything listens. Both ports are real ones; with `uds` HTTP is served there instead."""

    run: Path
    host: str
    port: int
    grpc_port: int
    uds: Path | None = None
    has_tls: bool = False

    @property
    def store_socket(self) -> Path:
        return self.run / "kv_store.sock"

    @property
    def worker_socket(self) -> Path:
        return self.run / "gpu_worker.sock"

    @property
    def url(self) -> str:
        scheme = "https" if self.has_tls else "http"
        return f"{scheme}://localhost" if self.uds else f"{scheme}://{reachable_host(self.host)}:{self.port}"

    def client(self, timeout_s: float) -> httpx.Client:
        """Return a client for the gateway, our own child: no proxy, and its certificate is for other names."""
        way = httpx.HTTPTransport(uds=None if self.uds is None else str(self.uds), verify=False)
        return httpx.Client(base_url=self.url, transport=way, trust_env=False, timeout=timeout_s)


@contextmanager
def held_port(host: str, port: int, flag: str) -> Iterator[int]:
    """`port`, or a free one for 0, which no connection of another process can take while the block runs.

    Loading a model takes minutes, in which Ray and others are given ports by the kernel; it gives none that is bound.
    Servers set SO_REUSEADDR, and with it one can listen beside a socket that is bound and does not. Raises
    PortInUseError, which names `flag`, where another listens.
    """
    try:
        holder = tcp_socket(host, port)
    except socket.gaierror as exc:
        raise PortInUseError(host, port, "--host", exc.strerror or str(exc)) from exc
    except OSError as exc:
        raise PortInUseError(host, port, flag, os.strerror(exc.errno or 0)) from exc
    with holder:
        yield int(holder.getsockname()[1])


def reachable_host(host: str) -> str:
    """The address, in URL form, at which this machine reaches a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable
