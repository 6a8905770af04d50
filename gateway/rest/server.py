"""The HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from gateway.config import GatewayConfig
from gateway.rest.app import create_app
from gateway.rest.connection import Connection, Connections
from gateway.service import ChatService


class RESTServer(uvicorn.Server):
    """The API over one service, on sockets that `serve` is given. Without signal handlers: the process drains before it
    stops listening, and then connections get `close_timeout_s`."""

    def __init__(self, config: GatewayConfig, service: ChatService, close_timeout_s: int) -> None:
        connections = Connections(config.connection_limit, config.header_timeout_s, config.write_timeout_s)
        # uvicorn asks for a class, and calls it
        protocol: Any = partial(Connection, connections=connections)
        super().__init__(
            uvicorn.Config(
                create_app(config, service),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                # what else is installed must not choose the parser
                http=protocol,
                ws="none",
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                timeout_graceful_shutdown=close_timeout_s,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield
