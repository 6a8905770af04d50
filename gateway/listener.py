"""The socket that the gateway listens on, and what is said when it can take no connection."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from pathlib import Path
from typing import Any

from gateway.config import GatewayConfig
from gateway.errors import ConfigError

BACKLOG = 1024
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SAID_EVERY_S = 60.0

log = logging.getLogger(__name__)


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


class AcceptErrors:
    """A loop's exception handler. The loop tells of every connection that it cannot take, thousands a second where
    descriptors have run out: here it is said once in `SAID_EVERY_S`."""

    def __init__(self) -> None:
        self._said_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if getattr(error, "errno", None) not in SHORTAGES:
            loop.default_exception_handler(context)
        elif loop.time() >= self._said_at + SAID_EVERY_S:
            self._said_at = loop.time()
            log.error("connections cannot be taken (%s): raise the limit of descriptors (ulimit -n)", error)
