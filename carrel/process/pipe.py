"""Whether a line can be written without waiting for whoever reads it."""

from __future__ import annotations

import io
import select
from typing import TextIO


def has_room(stream: TextIO) -> bool:
    """Whether a line of less than 4 KiB goes out at once. False where a pipe is full: its reader hangs, and must not
    hold up this process too. A closed pipe has room: writing to it tells."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
    except (io.UnsupportedOperation, ValueError, AttributeError):
        # No file, but memory.
        return True
    return bool(poll.poll(0))
