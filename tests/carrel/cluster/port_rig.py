"""Listening ports of a host that is a network namespace, and their answers to other hosts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import ray
from ray_network import Host
from scanning import open_ports
from waiting import PATIENCE

# Ray 2.60 looks for the caller's node before it looks for its token, and ends itself without one: tried last
START_SYNC = "/ray.rpc.syncer.RaySyncer/StartSync"


def listeners(host: Host) -> dict[int, str]:
    """Return the name of the process that owns each port."""
    lines = subprocess.run(host.within("ss", "-tlnpHO"), capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\S+ +\S+ +\S+ +\S+:(\d+) .*?pid=(\d+)", lines, re.MULTILINE)
    return {int(port): name_of(psutil.Process(int(pid))) for port, pid in found}


def name_of(process: psutil.Process) -> str:
    words = [Path(word.strip()).name for word in process.cmdline() if not word.startswith("-")]
    return words[1 if words[0].startswith("python") else 0]


def seen(host: Host, address: str) -> dict[int, str]:
    """The open ports of an address of a host, and whose they are."""
    names = listeners(host)
    return {port: names[port] for port in open_ports(address)}


@contextmanager
def by_the_public_link(host: Host) -> Iterator[None]:
    """A neighbour in the clients' network sends what is for the host's private address over its public link."""
    route = (host.address, "via", host.public_address)
    subprocess.run(["ip", "route", "add", *route], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "route", "del", *route], check=True)


def methods() -> list[str]:
    """Every method of every gRPC service of Ray, as its servers and stubs spell them, but one."""
    package = Path(ray.__file__).parent
    servers = (package / "core/src/ray/gcs/gcs_server", package / "core/src/ray/raylet/raylet")
    found = set[str]()
    for file in (*servers, *package.glob("*/generated/*_pb2_grpc.py")):
        found |= {name.decode() for name in re.findall(rb"/ray\.[a-z.]+[A-Z]\w+/[A-Z]\w+", file.read_bytes())}
    return sorted(found - {START_SYNC})


def call(channel: grpc.Channel, method: str, token: str = "") -> str:
    """The status of a call with a token, or none."""
    try:
        list(
            channel.unary_stream(method)(
                b"", timeout=PATIENCE, metadata=(("authorization", f"Bearer {token}"),) if token else ()
            )
        )
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"
