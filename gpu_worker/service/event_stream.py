"""A bounded queue of one request's events, from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable

from gpu_worker.errors import SlowConsumer
from gpu_worker.records import AttentionEvent, CompleteEvent, ErrorEvent, Event, ProgressEvent

MAX_PENDING_EVENTS = 4096


class EventStream:
    """Its `put` is an EventSink for any thread; iterating it yields the events in order, once each.

    Progress that was not yet read is replaced by newer progress; while an AttentionEvent waits, others are left out.
    When `max_pending` events wait unread, they are dropped for one ErrorEvent(SlowConsumer), later events are ignored
    and `on_overflow` is called.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_overflow: Callable[[], None],
        max_pending: int = MAX_PENDING_EVENTS,
    ) -> None:
        self._loop = loop
        self._on_overflow = on_overflow
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._pending: deque[Event] = deque()
        self._is_closed = False
        # One waits unread, which is large.
        self._tells_attention = False
        self._has_events = asyncio.Event()

    def put(self, event: Event) -> None:
        overflows = False
        with self._lock:
            if self._is_closed:
                return
            if self._pending and type(self._pending[-1]) is type(event) is ProgressEvent:
                self._pending[-1] = event
                return
            if type(event) is AttentionEvent:
                if self._tells_attention:
                    return
                self._tells_attention = True
            if len(self._pending) >= self._max_pending:
                overflows = self._is_closed = True
                self._pending.clear()
                event = ErrorEvent(SlowConsumer(f"The stream was not read for {self._max_pending} events."))
            self._pending.append(event)
            if len(self._pending) == 1:
                self._wake()
        if overflows:
            self._on_overflow()

    def close(self) -> None:
        """Ignore what still comes; the reader is gone."""
        with self._lock:
            self._is_closed = True
            self._pending.clear()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._has_events.set)
        except RuntimeError:
            # the loop has ended, and every reader with it
            self._is_closed = True

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Up to and including the request's last event."""
        while True:
            await self._has_events.wait()
            self._has_events.clear()
            while (event := self._take()) is not None:
                yield event
                match event:
                    case CompleteEvent() | ErrorEvent():
                        return

    def _take(self) -> Event | None:
        with self._lock:
            event = self._pending.popleft() if self._pending else None
            if type(event) is AttentionEvent:
                self._tells_attention = False
            return event
