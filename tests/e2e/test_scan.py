"""Scan a server from another host, by `make faults`: the server's host is a network namespace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from figures import tell
from ray_network import Host, can_make_networks, network
from scanning import open_ports
from serving import NANO, ROOT
from waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not can_make_networks(), reason="needs the right to make network namespaces"),
]

PORT, GRPC_PORT = 8000, 8001


@contextmanager
def served(host: Host, folder: Path, *options: str) -> Iterator[None]:
    """`carrel serve` on a host, until the block ends."""
    folder.mkdir()
    log = folder / "log"
    command = host.within(sys.executable, "-m", "carrel", "serve", str(NANO), "--no-warmup", *options)
    sizes = ("--arena-bytes", "256MiB", "--slot-memory", "256MiB", "--trainers", "1")
    environment = {"XDG_RUNTIME_DIR": str(folder), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        variables = [f"{name}={value}" for name, value in environment.items()]
        process = subprocess.Popen(["env", *variables, *command, *sizes], stdout=output, stderr=output)
    try:
        wait_until(
            lambda: process.poll() is not None or "ready  http" in log.read_text(), log.read_text, poll=0.5
        )
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def test_another_host_reaches_the_gateways_ports_where_they_are_opened_and_nothing_else(
    tmp_path: Path,
) -> None:
    with network(1) as net:
        [server] = net.hosts
        with served(server, tmp_path / "loopback"):
            closed = open_ports(server.address)
        with served(server, tmp_path / "open", "--host", "0.0.0.0", "--api-key", "mine-0123456789abcdef"):
            opened = open_ports(server.address)
        tell("a scan of 65,535 ports from another host", **{"default": closed, "--host 0.0.0.0": opened})
        assert closed == []
        assert opened == [PORT, GRPC_PORT]
