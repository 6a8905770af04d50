"""The HTTP server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from gateway.config import GatewayConfig
from gateway.rest.acceptor import Acceptor
from gateway.rest.app import create_app
from gateway.rest.connection import Connection, Shared
from gateway.rest.seats import Seats
from gateway.service import ChatService


class RESTServer(uvicorn.Server):
    """The API over one service, on sockets that `serve` is given. Without signal handlers: the process drains before it
    stops listening, and then connections get `close_timeout_s`."""

    def __init__(self, config: GatewayConfig, service: ChatService, close_timeout_s: int) -> None:
        self._seats = Seats(config.connection_limit)
        self._shared = Shared(config.header_timeout_s, config.write_timeout_s)
        super().__init__(
            uvicorn.Config(
                create_app(config, service),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                # what else is installed must not choose the parser
                http=Connection,
                ws="none",
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                timeout_graceful_shutdown=close_timeout_s,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, which uvicorn would do without a bound."""
        await self.lifespan.startup()
        make = partial(
            Connection,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            shared=self._shared,
        )
        acceptors: Any = [
            Acceptor(each, self._seats, make, self.config.ssl, self._shared.header_timeout_s)
            for each in sockets or ()
        ]
        self.servers = acceptors
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield
