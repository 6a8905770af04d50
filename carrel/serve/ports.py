"""The ports to listen on, held from before anything is loaded."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from carrel.errors import PortInUseError
from gateway.listener import tcp_socket


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
