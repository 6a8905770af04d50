"""The ports to listen on, checked before anything is loaded."""

from __future__ import annotations

import os
import socket

from carrel.errors import PortInUseError


def claim_port(host: str, port: int, flag: str) -> int:
    """`port` if `host` can listen on it, or a free one for 0. Raises PortInUseError, which names `flag`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            return int(listener.getsockname()[1])
    except socket.gaierror as exc:
        raise PortInUseError(host, port, "--host", exc.strerror or str(exc)) from exc
    except OSError as exc:
        raise PortInUseError(host, port, flag, os.strerror(exc.errno or 0)) from exc


def reachable_host(host: str) -> str:
    """The address, in URL form, at which this machine reaches a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable
