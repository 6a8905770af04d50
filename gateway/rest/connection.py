"""HTTP connections: how long one may have no request, and how long an answer may lie unread."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass, field
from typing import Any, cast

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gateway.rest.seats import Seat

# that a connection reads in one turn of the event loop
READ_BYTES = 2**14
# asks a client that sends no more whether it is still there: one that has closed answers with a reset
STILL_THERE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shared:
    """State that all connections of a server share.

    header_timeout_s: how long a connection may be without a request.
    write_timeout_s: how long a client may take nothing of what is written to it.
    """

    header_timeout_s: float
    write_timeout_s: float
    # TLS writes to parts of it, which of a bytearray would be copies
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's, with an end, that reads little at once: of a body in chunks of one byte each byte is an event of h11,
    and a read of asyncio's 256 KiB would be half a second of them.

    Without a request are: the time from the connection's start, or from its last answer, until a request's head is
    complete. No byte prolongs it. A body is read only as far as the application asks for it.

    A client that closes its sending side behind a whole request gets its answer. It looks like one that has left, so it
    is sent an interim response, which the latter refuses.
    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], shared: Shared, seat: Seat
    ) -> None:
        """seat: told to each request's application as `scope["state"]["seat"]`."""
        super().__init__(config, server_state, {**app_state, "seat": seat})
        self._shared = shared
        self._seat = seat
        self._sends_no_more = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let it begin."""
        link = cast(asyncio.Transport, transport)
        super().connection_made(link)
        # an answer's next piece waits until the kernel has the one before, so that what stalls is seen, and is small
        link.set_write_buffer_limits(high=1, low=0)
        self._seat.transport = link
        if self._seat.is_taken:
            self._watch_head()
        else:
            # it gave way before it was opened
            link.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        self._leave()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True: its connection stays open for the answer."""
        if self._sends_no_more:
            return True
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started:
            return False
        # TLS has no half of a connection, and HTTP/1.0 no interim responses
        if self.scheme == "https" or cycle.scope["http_version"] != "1.1":
            return False
        self._sends_no_more = True
        self.transport.write(STILL_THERE)
        self._probe()
        return True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where asyncio writes what it reads, and says so before it reads from another connection."""
        return self._shared.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take this many bytes that were read."""
        self.data_received(bytes(self._shared.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """A request's head may be complete now."""
        super().data_received(data)
        if self.cycle is not None and self.cycle.body and not self.cycle.response_complete:
            # the application's next `receive` resumes
            self.flow.pause_reading()
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """End a connection that does not speak HTTP, with an answer if none has begun."""
        if self.cycle is not None:
            # whatever it was about to say
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """The time without a request begins."""
        self.cycle.body.clear()
        super().on_response_complete()
        if self._sends_no_more and self.cycle.response_complete:
            self.transport.close()
        self._watch_head()

    def pause_writing(self) -> None:
        """The kernel takes no more: the client reads slowly, or not at all."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """The kernel has all."""
        super().resume_writing()
        _cancel(self._write_timer)
        self._write_timer = None

    def end(self) -> None:
        """Close at once, whatever is still to be written."""
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        self._seat.leave()
        for timer in (self._head_timer, self._write_timer, self._probe_timer):
            _cancel(timer)
        self._head_timer = self._write_timer = self._probe_timer = None

    def _watch_head(self) -> None:
        if not self._seat.is_taken:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.more_body:
                self._seat.receive()
            else:
                self._seat.serve()
            _cancel(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None:
            self._seat.wait()
            self._head_timer = self.loop.call_later(self._shared.header_timeout_s, self._end_idle)

    def _end_idle(self) -> None:
        self._head_timer = None
        if self._write_timer is None:
            self.end()
        else:
            # its last answer is still being read
            self._watch_head()

    def _probe(self) -> None:
        link: socket.socket = self.transport.get_extra_info("socket")
        if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.end()
        else:
            self._probe_timer = self.loop.call_later(PROBE_S, self._probe)

    def _watch_writing(self) -> None:
        if self._seat.is_taken:
            left = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(self._shared.write_timeout_s, self._end_unread, left)

    def _end_unread(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_writing()
            return
        log.info("a client took nothing of its answer for %g s", self._shared.write_timeout_s)
        self.end()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
