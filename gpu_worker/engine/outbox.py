"""Events for requests, told while the device works."""

from __future__ import annotations

from collections import deque

import torch

from gpu_worker.records import Event
from gpu_worker.state.sequence import Sequence


class Outbox:
    """Between two decode steps the device has nothing to do, and telling a batch's tokens takes the host about as long
    as queueing a step. So a step's tokens are told once the next one is queued. A CPU is host and device in one:
    there nothing is held back."""

    def __init__(self, device: torch.device) -> None:
        self._holds = device.type != "cpu"
        self._held = deque[tuple[Sequence, Event]]()

    def put(self, sequence: Sequence, event: Event) -> None:
        if self._holds:
            self._held.append((sequence, event))
        else:
            sequence.sink(event)

    def tell(self) -> None:
        """All that is held back, in its order."""
        while self._held:
            sequence, event = self._held.popleft()
            sequence.sink(event)
