"""HTTP connections: how many there may be, how long one may have no request, and how long an answer may lie unread."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# of a connection that is refused: over TLS its close is a conversation
REFUSED_S = 1.0
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
)

# that a connection reads in one turn of the event loop
READ_BYTES = 2**14

log = logging.getLogger(__name__)


@dataclass
class Connections:
    """The open connections of a server, at most `limit`; those without a request in the order in which they began so.

    header_timeout_s: how long a connection may be without a request; write_timeout_s: how long a client may take
    nothing of what is written to it.
    """

    limit: int
    header_timeout_s: float
    write_timeout_s: float
    num_open: int = 0
    idle: dict[Connection, None] = field(default_factory=dict)
    # TLS writes to parts of it, which of a bytearray would be copies
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))

    def admit(self) -> bool:
        """Count one more. Where there is no room the longest idle one gives way; False: none is idle."""
        if self.num_open >= self.limit:
            if not self.idle:
                return False
            next(iter(self.idle)).end()
        self.num_open += 1
        return True


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's, with an end, that reads little at once: of a body in chunks of one byte each byte is an event of h11,
    and a read of asyncio's 256 KiB would be half a second of them.

    Without a request are: the time from the connection's start, or from its last answer, until a request's head is
    complete. No byte prolongs it.
    """

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._all = connections
        self._is_counted = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse it, or let it begin."""
        socket = cast(asyncio.Transport, transport)
        super().connection_made(socket)
        # an answer's next piece waits until the kernel has the one before, so that what stalls is seen, and is small
        socket.set_write_buffer_limits(high=1, low=0)
        self._is_counted = self._all.admit()
        if self._is_counted:
            self._watch_head()
            return
        socket.write(REFUSAL)
        socket.close()
        self._head_timer = self.loop.call_later(REFUSED_S, socket.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        self._leave()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where asyncio writes what it reads, and says so before it reads from another connection."""
        return self._all.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So much of it was read."""
        self.data_received(bytes(self._all.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """A request's head may be complete now."""
        super().data_received(data)
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP ends the connection, and is answered where nothing else has been."""
        if self.cycle is not None:
            # whatever it was about to say
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """The time without a request begins."""
        super().on_response_complete()
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
        """Close at once, whatever is still to be written. Its room is free when this returns."""
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        self._all.num_open -= self._is_counted
        self._is_counted = False
        self._all.idle.pop(self, None)
        _cancel(self._head_timer)
        self._head_timer = None
        _cancel(self._write_timer)
        self._write_timer = None

    def _watch_head(self) -> None:
        if not self._is_counted:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._all.idle.pop(self, None)
            _cancel(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None:
            self._all.idle[self] = None
            self._head_timer = self.loop.call_later(self._all.header_timeout_s, self._end_idle)

    def _end_idle(self) -> None:
        self._head_timer = None
        if self._write_timer is None:
            self.end()
        else:
            # its last answer is still being read
            self._watch_head()

    def _watch_writing(self) -> None:
        if self._is_counted:
            left = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(self._all.write_timeout_s, self._end_unread, left)

    def _end_unread(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_writing()
            return
        log.info("a client took nothing of its answer for %g s", self._all.write_timeout_s)
        self.end()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
