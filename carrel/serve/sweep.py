"""Find and end what a run left behind: grandchildren such as Ray's, whatever their parent is by now."""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil

MARKER = "CARREL_RUN"
ROUNDS = 5


def find_marked(run: str) -> list[psutil.Process]:
    """Every process, ours excepted, whose environment carries this run's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARKER) == run:
                found.append(process)
        except (psutil.Error, OSError):
            # gone, a zombie, or another user's: none of ours to end
            continue
    return found


def find_descendants(pids: Iterable[int]) -> list[psutil.Process]:
    """All processes below `pids`, also those that cleared their environment."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            found |= {process.pid: process for process in psutil.Process(pid).children(recursive=True)}
        except psutil.Error:
            continue
    return list(found.values())


def sweep(run: str, known: Iterable[psutil.Process] = (), timeout_s: float = 5.0) -> list[str]:
    """SIGKILL what is left of a run and return the names of what had to be killed.

    `known` are processes seen below the children before those ended. Several rounds, because what is being
    killed may still fork.
    """
    killed = []
    left = list(known)
    for _ in range(ROUNDS):
        # is_running compares start times, so a reused pid is safe
        alive = {process.pid: process for process in (*left, *find_marked(run)) if _is_alive(process)}
        if not alive:
            break
        for process in alive.values():
            try:
                name = process.name()
                process.kill()
            except psutil.Error:
                continue
            killed.append(name)
        left = psutil.wait_procs(list(alive.values()), timeout=timeout_s)[1]
    return killed


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
