"""Points in a device's work, and when they were reached."""

from __future__ import annotations

import time

import torch


class Mark:
    """Everything queued on the device's current stream so far. On a CPU that is done when the mark is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._time = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_reached(self) -> bool:
        """Asks without waiting."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Let the host wait until it is reached."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self) -> None:
        """Let what is queued on the current stream from here on wait until it is reached; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def seconds_since(self, earlier: Mark) -> float:
        """Between two marks that are reached."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time
