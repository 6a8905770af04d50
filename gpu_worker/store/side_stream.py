"""A device's second queue of work, for copies beside computing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """A stream beside the current one; on a CPU there is none, and all happens at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        """Work queued within runs after what the current stream has by now, and beside what it gets later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Let the host wait until all of it is done."""
        if self._stream is not None:
            self._stream.synchronize()
