"""How many connections there may be, and which one is closed for the next where there are as many."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
)


@dataclass(slots=True)
class Yielding:
    """Connections of one owner that may be closed for another, the longest first: those without a request, and those on
    which a request's body is still being sent."""

    idle: dict[Seat, None] = field(default_factory=dict)
    receiving: dict[Seat, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.idle) + len(self.receiving)


class Seats:
    """The open connections of a server, at most `limit`.

    An owner is a client's address until the key of a request is known, and then the caller. Where no seat is free, the
    owner with the most connections that may be closed loses one, first of those without a request, and one with a
    half-sent body only to an owner that has fewer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owners: dict[bytes, Yielding] = {}
        self.num_taken = 0

    def take(self, owner: bytes) -> Seat | None:
        """A seat for a new connection, which is without a request; None where there is none."""
        if self.num_taken >= self._limit:
            if (last := self._last(owner)) is None:
                return None
            last.end()
        self.num_taken += 1
        seat = Seat(self, owner)
        seat.wait()
        return seat

    def add(self, seat: Seat, is_receiving: bool) -> None:
        owner = self._owners.setdefault(seat.owner, Yielding())
        (owner.receiving if is_receiving else owner.idle)[seat] = None

    def remove(self, seat: Seat) -> None:
        owner = self._owners.get(seat.owner)
        if owner is not None:
            owner.idle.pop(seat, None)
            owner.receiving.pop(seat, None)
            if not owner:
                del self._owners[seat.owner]

    def _last(self, newcomer: bytes) -> Seat | None:
        if not self._owners:
            return None
        most = max(self._owners.values(), key=len)
        own = len(self._owners.get(newcomer, ()))
        if not most.idle and len(most) > own + 1:
            return _first(most.receiving)
        return _first(most.idle) or _first(seat for each in self._owners.values() for seat in each.idle)


class Seat:
    """One connection's place. `end` closes the connection, whether it has been opened or is still being opened."""

    def __init__(self, seats: Seats, owner: bytes) -> None:
        self._seats = seats
        self.owner = owner
        self._is_taken = True
        # None: it is being served, and stays
        self._is_receiving: bool | None = None
        self.opening: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None

    @property
    def is_taken(self) -> bool:
        return self._is_taken

    def wait(self) -> None:
        """The connection is without a request."""
        self._set(False)

    def receive(self) -> None:
        """The body of its request is being sent."""
        self._set(True)

    def serve(self) -> None:
        """Its request is being answered: it may not be closed for another."""
        self._set(None)

    def belong(self, owner: bytes) -> None:
        """The connection is another owner's from now on."""
        if self._is_taken and owner != self.owner:
            state, self._is_receiving = self._is_receiving, None
            self._seats.remove(self)
            self.owner = owner
            self._set(state)

    def leave(self) -> None:
        """Free the seat."""
        if self._is_taken:
            self._set(None)
            self._seats.num_taken -= 1
            self._is_taken = False

    def end(self) -> None:
        """Close the connection; one that was sending gets 503. The seat is free when this returns."""
        is_sending = self._is_receiving
        self.leave()
        if self.transport is None:
            if self.opening is not None:
                self.opening.cancel()
        elif is_sending:
            self.transport.write(REFUSAL)
            self.transport.close()
        else:
            self.transport.abort()

    def _set(self, is_receiving: bool | None) -> None:
        if not self._is_taken or (is_receiving is self._is_receiving and is_receiving is not None):
            return
        self._seats.remove(self)
        self._is_receiving = is_receiving
        if is_receiving is not None:
            self._seats.add(self, is_receiving)


def _first(seats: Iterable[Seat]) -> Seat | None:
    return next(iter(seats), None)
