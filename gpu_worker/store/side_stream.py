"""A device's second queue of work, for what runs beside the current one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """A stream beside the current one; on a CPU there is none, and all happens at once."""

    def __init__(self, device: torch.device, is_first: bool = False) -> None:
        """is_first: its programs are placed before those of other streams that wait for a processor too."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1 if is_first else 0)

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        """Work queued within runs after what the current stream has by now, and beside what it gets later. Until that
        waits, tensors of the current stream that are read or written here must stay."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait from here on until all of it is done; the host does not wait. A capture that the
        queue took part in ends after this."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait(self) -> None:
        """Let the host wait until all of it is done."""
        if self._stream is not None:
            self._stream.synchronize()
