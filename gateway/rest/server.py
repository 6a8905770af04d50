"""The HTTP server: each connection has a seat before its TLS handshake, and descriptors stay for a refusal."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import uvicorn

from gateway.config import GatewayConfig
from gateway.rest.app import create_app
from gateway.rest.connection import Connection, Shared
from gateway.rest.seats import REFUSAL, Seat, Seats
from gateway.service import ChatService

# in one turn of the event loop
AT_ONCE = 16
# seconds of a connection that is refused, so that its client reads why; over TLS that is a conversation
REFUSED_S = 1.0
# those at once; one more is closed without a word
MOST_REFUSED = 16
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SAID_EVERY_S = 60.0
# after a shortage
PAUSE_S = 1.0

log = logging.getLogger(__name__)


class Acceptor:
    """Serves a listening socket until `close`. Must be built inside the event loop.

    make: a protocol for a connection, given its `seat`.
    """

    def __init__(
        self,
        listener: socket.socket,
        seats: Seats,
        make: partial[Any],
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._listener = listener
        self._seats = seats
        self._make = make
        self._tls = tls
        self._handshake_timeout_s = None if tls is None else handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_refused = 0
        self._said_at = -math.inf
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for: uvicorn waits for the connections."""

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                link, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._wait(error)
                return
            link.setblocking(False)
            seat = self._seats.take(_host(address))
            if seat is not None:
                seat.opening = self._start(self._open(link, seat))
                # also when it is cancelled before it begins
                seat.opening.add_done_callback(partial(_leave_unopened, link, seat))
            elif self._num_refused < MOST_REFUSED:
                self._num_refused += 1
                self._start(self._refuse(link))
            else:
                link.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open(self, link: socket.socket, seat: Seat) -> None:
        try:
            await self._connect(partial(self._make, seat=seat), link)
        except OSError as error:
            # no TLS, or not in time
            log.debug("a connection was not opened: %s", error)

    async def _refuse(self, link: socket.socket) -> None:
        refusal = Refusal()
        try:
            async with asyncio.timeout(REFUSED_S):
                await self._connect(lambda: refusal, link)
                await refusal.ended.wait()
        except (OSError, TimeoutError):
            pass
        finally:
            self._num_refused -= 1
            refusal.end()
            link.close()

    async def _connect(self, make: Callable[[], asyncio.Protocol], link: socket.socket) -> None:
        await self._loop.connect_accepted_socket(
            make, link, ssl=self._tls, ssl_handshake_timeout=self._handshake_timeout_s
        )

    def _wait(self, error: OSError) -> None:
        """The kernel tells of a connection that cannot be taken again and again, so it is not asked for a while."""
        if error.errno not in SHORTAGES:
            raise error
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(PAUSE_S, self._resume)
        if self._loop.time() >= self._said_at + SAID_EVERY_S:
            self._said_at = self._loop.time()
            log.error("connections cannot be taken (%s): raise the limit of descriptors (ulimit -n)", error)


class Refusal(asyncio.Protocol):
    """Says 503 and reads on: a close before the client's request is read would take the answer from it."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = link = cast(asyncio.Transport, transport)
        link.write(REFUSAL)
        if link.can_write_eof():
            link.write_eof()
        else:
            link.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def end(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()


def _leave_unopened(link: socket.socket, seat: Seat, opening: asyncio.Task[None]) -> None:
    if seat.transport is None:
        seat.leave()
        link.close()


def _host(address: Any) -> bytes:
    """Return a client's address; empty on a Unix socket."""
    match address:
        case (str(host), *_):
            return host.encode()
    return b""


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
