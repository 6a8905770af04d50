"""A check that a line can be written without waiting for its reader."""

from __future__ import annotations

import io
import select
from typing import TextIO


def has_room(stream: TextIO) -> bool:
    """Return whether a line of less than 4 KiB can be written at once.

    False where a pipe is full: its reader hangs, and must not hold up this process too. True for a closed pipe, so
    that writing to it raises.
    """
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
    except (io.UnsupportedOperation, ValueError, AttributeError):
        # No file, but memory.
        return True
    return bool(poll.poll(0))
