"""Ports for servers that a test starts as processes of their own."""

from __future__ import annotations

import os
import random
import socket

# Below those that Linux gives to outgoing connections: nothing takes one between the test's look and the server's.
FIRST, LAST, PER_PROCESS = 20_000, 32_000, 200


def free_port() -> int:
    """As `free_ports`, one."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different loopback TCP ports that nobody listens on; each process of pytest-xdist has a range of its own."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    begin = FIRST + number * PER_PROCESS % (LAST - FIRST)
    free: list[int] = []
    for port in random.SystemRandom().sample(range(begin, begin + PER_PROCESS), PER_PROCESS):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            free.append(port)
        if len(free) == count:
            return free
    raise OSError(f"no free port in {begin} to {begin + PER_PROCESS - 1}: end what listens there")
