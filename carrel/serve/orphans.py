"""Processes whose parent was killed: they become our children, whatever their session and environment, and are
ended."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Collection, Iterator

import psutil

from carrel.serve.sweep import find_descendants

_PR_SET_CHILD_SUBREAPER = 36
ROUNDS = 5
TIMEOUT_S = 5.0


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Let every process below us whose parent ends become our child until the block ends."""
    _set_subreaper(1)
    try:
        yield
    finally:
        _set_subreaper(0)


def end_orphans(own: Collection[int]) -> None:
    """SIGKILL and reap our children but `own`, with all below them. Several rounds: what is killed may still fork."""
    for _ in range(ROUNDS):
        orphans = [process for process in psutil.Process().children() if process.pid not in own]
        if not orphans:
            return
        for process in (*find_descendants(process.pid for process in orphans), *orphans):
            with contextlib.suppress(psutil.Error):
                process.kill()
        # our children: waiting reaps them
        psutil.wait_procs(orphans, timeout=TIMEOUT_S)


def _set_subreaper(value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
