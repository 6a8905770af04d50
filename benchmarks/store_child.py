"""`python -m benchmarks.store_child ARENA_BYTES TRAINERS`: a KV store in a process of its own, until stdin ends.

Stdout: its address, and that for other stores if CARREL_PEER_TOKEN is set, on one line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kv_store.local import LocalStore

ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 60
TOKEN_VARIABLE = "CARREL_PEER_TOKEN"
LOOPBACK = "127.0.0.1"


@contextmanager
def running_store(arena_bytes: int, num_trainers: int) -> Iterator[str]:
    """The address of a store that runs inside."""
    with running_peer(arena_bytes, num_trainers, "") as (target, _):
        yield target


@contextmanager
def running_peer(arena_bytes: int, num_trainers: int, token: str) -> Iterator[tuple[str, str]]:
    """The same, and where other stores of this token read prefixes over TCP; nowhere without a token."""
    command = [sys.executable, "-m", "benchmarks.store_child", str(arena_bytes), str(num_trainers)]
    environment = {**os.environ, TOKEN_VARIABLE: token}
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        target, _, peer = child.stdout.readline().strip().partition(" ")
        yield target, peer
    finally:
        child.stdin.close()
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()


def main(arena_bytes: int, num_trainers: int) -> None:
    token = os.environ.get(TOKEN_VARIABLE, "")
    peer_listen = f"{LOOPBACK}:0" if token else ""
    with LocalStore(
        arena_bytes, num_trainers=num_trainers, peer_listen=peer_listen, peer_token=token
    ) as store:
        peer = f" {LOOPBACK}:{store.server.peer_port}" if token else ""
        print(f"{store.target}{peer}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
