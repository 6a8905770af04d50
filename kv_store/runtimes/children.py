"""The processes below this one: adopted, counted and ended, whatever started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from kv_store.errors import ConfigError

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let grandchildren whose parent ends become our children, so that none outlives us unseen."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise ConfigError(f"--runtime ray: prctl refused: {os.strerror(ctypes.get_errno())}")


def children(parent: int) -> list[int]:
    """Process ids of the direct children."""
    lists = Path(f"/proc/{parent}/task").glob("*/children")
    found = []
    for path in lists:
        # It may be gone by now.
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in path.read_text().split()]
    return found


def descendants(parent: int) -> list[int]:
    """Process ids of the children, of their children, and so on."""
    direct = children(parent)
    return [*direct, *(pid for child in direct for pid in descendants(child))]


def ended_children() -> Iterator[str]:
    """Program names of our children that have ended and were not waited for."""
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            # The name is in parentheses and may hold any character; the state follows.
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(") ")
            if rest.startswith("Z"):
                yield name


def end_children(seconds: float) -> None:
    """Wait so long for our children, which were told to end; then kill those that remain."""
    deadline = time.monotonic() + seconds
    while left := children(os.getpid()):
        for pid in left:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
