"""The processes below this one: adopted, counted and ended, whatever started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator

import psutil

from kv_store.errors import ConfigError

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let grandchildren whose parent ends become our children, so that none outlives us unseen."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise ConfigError(f"--runtime ray: prctl refused: {os.strerror(ctypes.get_errno())}")


def ended_children() -> Iterator[str]:
    """Yield program names of our children that have ended and were not waited for."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                yield child.name()


def end_children(seconds: float) -> None:
    """Wait so long for our children to end; then kill those that remain."""
    deadline = time.monotonic() + seconds
    while left := psutil.Process().children():
        for child in left:
            with contextlib.suppress(psutil.Error):
                if time.monotonic() > deadline:
                    child.kill()
                child.wait(0)
        time.sleep(0.05)
