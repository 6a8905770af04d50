"""The socket that the gateway listens on."""

from __future__ import annotations

import socket
from pathlib import Path

from gateway.config import GatewayConfig
from gateway.errors import ConfigError

BACKLOG = 1024


def bind(config: GatewayConfig) -> socket.socket:
    """The listening socket. Raises ConfigError when the address or the port cannot be had."""
    if config.uds is not None:
        return _bind_path(config.uds)
    try:
        return tcp_socket(config.host, config.port, BACKLOG)
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port} ({exc.strerror}): choose another with --host or --port"
        ) from exc


def tcp_socket(host: str, port: int, backlog: int = 0) -> socket.socket:
    """Bound to the address, and listening with a `backlog`; without one it only holds the port. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if backlog:
            bound.listen(backlog)
    except OSError:
        bound.close()
        raise
    return bound


def _bind_path(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _is_listening(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"--uds {path} cannot be used ({exc.strerror or exc}): choose another path"
        ) from exc
    return listener


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
