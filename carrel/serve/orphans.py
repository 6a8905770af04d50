"""Processes whose parent was killed: they become our children, whatever their session and environment, and are
ended."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Collection, Iterator

import psutil

_PR_SET_CHILD_SUBREAPER = 36
ROUNDS = 5
TIMEOUT_S = 5.0


@contextlib.contextmanager
def adopting_orphans() -> Iterator[set[int]]:
    """Let every process below us whose parent ends become our child until the block ends. Yields the ids of the
    children that we have already."""
    _set_subreaper(1)
    try:
        yield {process.pid for process in psutil.Process().children()}
    finally:
        _set_subreaper(0)


def end_orphans(own: Collection[int]) -> None:
    """SIGKILL and reap our children but `own`, with all below them. Several rounds: what is killed may still fork."""
    for _ in range(ROUNDS):
        orphans = [process for process in psutil.Process().children() if process.pid not in own]
        if not orphans:
            return
        for orphan in orphans:
            with contextlib.suppress(psutil.Error):
                for process in (*orphan.children(recursive=True), orphan):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
        # our children: waiting reaps them
        psutil.wait_procs(orphans, timeout=TIMEOUT_S)


def _set_subreaper(value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
