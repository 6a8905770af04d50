"""Events for requests, emitted while the device works."""

from __future__ import annotations

from collections import deque

from gpu_worker.engine.request import Request
from gpu_worker.records import Event


class Outbox:
    """Holds events back until the device has work again.

    Between two decode steps a GPU has nothing to do, and emitting a batch's tokens takes the host about as long as
    queueing a step. So a step's tokens are emitted once the next one is queued.
    """

    def __init__(self, holds: bool) -> None:
        """holds: False on a CPU, which is host and device in one: there each event is emitted at once."""
        self._holds = holds
        self._held = deque[tuple[Request, Event]]()

    def put(self, request: Request, event: Event) -> None:
        if self._holds:
            self._held.append((request, event))
        else:
            request.sink(event)

    def emit(self) -> None:
        """Emit everything that is held back, in its order."""
        while self._held:
            request, event = self._held.popleft()
            request.sink(event)
