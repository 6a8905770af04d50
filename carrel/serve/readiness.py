"""How the supervisor learns that a process serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROBE_TIMEOUT_S = 1.0
PROBE_INTERVAL_S = 0.25


def grpc_serving(socket: Path) -> Callable[[], bool]:
    """A probe of grpc.health.v1 behind a Unix socket."""

    def probe() -> bool:
        if not socket.exists():
            return False
        # a fresh channel each time: a failed one would back off for seconds
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.RpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    return at_most_every(PROBE_INTERVAL_S, probe)


def http_ready(connect: Callable[[float], httpx.Client]) -> Callable[[], bool]:
    """A probe of the gateway's `/ready`; `connect` makes a client with so many seconds' patience."""

    def probe() -> bool:
        try:
            with connect(PROBE_TIMEOUT_S) as client:
                return client.get("/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    return at_most_every(PROBE_INTERVAL_S, probe)


def at_most_every(interval_s: float, probe: Callable[[], bool]) -> Callable[[], bool]:
    """`probe`, answering False without a look when the last look was less than `interval_s` ago."""
    last = -interval_s

    def limited() -> bool:
        nonlocal last
        now = time.monotonic()
        if now - last < interval_s:
            return False
        last = now
        return probe()

    return limited
