"""`python -m benchmarks.store_child ARENA_BYTES TRAINERS`: a KV store in a process of its own, until stdin ends.

Stdout: its address.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.children import wait_or_kill
from carrel.process.version import CHECKOUT
from kv_store.local import LocalStore

STOP_SECONDS = 60


@contextmanager
def running_store(arena_bytes: int, num_trainers: int) -> Iterator[str]:
    """The address of a store that runs inside."""
    command = [sys.executable, "-m", "benchmarks.store_child", str(arena_bytes), str(num_trainers)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child.stdout.readline().strip()
    finally:
        child.stdin.close()
        wait_or_kill(child, STOP_SECONDS)


def main(arena_bytes: int, num_trainers: int) -> None:
    with LocalStore(arena_bytes, num_trainers=num_trainers) as store:
        print(store.target, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
