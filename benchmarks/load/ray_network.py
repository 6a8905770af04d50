"""Ray nodes on this machine, each in a network namespace, so that a node can be cut off and a host lost."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.errors import BenchmarkError
from benchmarks.load.ray_cluster import PROXY_PATIENCE, WAIT_SECONDS, living_with
from carrel.process.version import CHECKOUT

PORT = 6379
STARTS = 4
OBJECT_STORE_BYTES = "80000000"
# of a net that nothing else here is likely to be on
SUBNET = "10.78.16"


def can_make_networks() -> bool:
    """Whether this process may make network namespaces."""
    name = f"cn-try-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    except FileNotFoundError:
        return False
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


@dataclass(frozen=True)
class Host:
    """One node's namespace."""

    number: int

    @property
    def name(self) -> str:
        return f"cn{self.number}"

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number + 1}"

    def within(self, *command: str) -> list[str]:
        """The command that runs another one there."""
        return ["ip", "netns", "exec", self.name, *command]

    def running(self, *words: str) -> list[psutil.Process]:
        """The processes that live there and have all `words` in their command line."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        processes = []
        for pid in pids.split():
            with suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(int(pid)))
        return living_with(words, processes)

    def kill(self) -> None:
        """All that runs there, at once: the host is lost."""
        for process in self.running():
            process.send_signal(signal.SIGKILL)

    def cut(self) -> None:
        """No packet goes in or out any more."""
        _ip("link", "set", f"{self.name}-out", "down")

    def join(self) -> None:
        """Packets go in and out again."""
        _ip("link", "set", f"{self.name}-out", "up")


class Network:
    """Hosts that reach each other and are reached from here; host 0 has Ray's head."""

    def __init__(self, hosts: tuple[Host, ...], environment: Mapping[str, str], folder: Path) -> None:
        self.hosts = hosts
        self._environment = {**environment, "RAY_ADDRESS": f"{hosts[0].address}:{PORT}"}
        self._folder = folder

    def start_ray(self, host: Host, cpus: int = 2) -> None:
        """A node there. Ray gives it 30 s to come up, which a busy machine may not have: then once more. Raises
        BenchmarkError."""
        head = ("--head", f"--port={PORT}", "--include-dashboard=false")
        where = head if host.number == 0 else (f"--address={self.hosts[0].address}:{PORT}",)
        command = (
            "ray",
            "start",
            *where,
            f"--node-ip-address={host.address}",
            f"--num-cpus={cpus}",
            "--num-gpus=0",
        )
        memory = f"--object-store-memory={OBJECT_STORE_BYTES}"
        for _ in range(STARTS):
            ended = self._run(host, *command, memory, "--disable-usage-stats")
            if ended.returncode == 0:
                return
            host.kill()
        raise BenchmarkError(f"ray start on {host.name}: {ended.stdout[-1500:]}{ended.stderr[-1500:]}")

    def carrel(self, *arguments: str) -> str:
        """Run a command of `carrel` on the head's host; its output. Raises BenchmarkError."""
        ended = self._run(self.hosts[0], sys.executable, "-P", "-m", "carrel", *arguments)
        if ended.returncode:
            raise BenchmarkError(f"carrel {arguments[0]}: {ended.stderr[-3000:]}")
        return ended.stdout

    def _run(self, host: Host, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            host.within(*command),
            env=self._environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )


@contextmanager
def network(number: int) -> Iterator[Network]:
    """So many hosts, until the block ends; nothing of theirs is left then. Needs rights to make namespaces."""
    hosts = tuple(Host(each) for each in range(number))
    bridge = "cn-bridge"
    with tempfile.TemporaryDirectory(prefix="rw-", dir="/tmp") as folder:
        token = Path(folder) / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(CHECKOUT),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            **dict.fromkeys(PROXY_PATIENCE, "60"),
        }
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{SUBNET}.254/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for host in hosts:
                _attach(host, bridge)
            yield Network(hosts, environment, Path(folder))
        finally:
            for host in hosts:
                host.kill()
            for host in hosts:
                subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _attach(host: Host, bridge: str) -> None:
    outer, inner = f"{host.name}-out", f"{host.name}-in"
    _ip("netns", "add", host.name)
    _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", host.name)
    _ip("link", "set", outer, "master", bridge, "up")
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", inner)
    for each in (inner, "lo"):
        _ip("-n", host.name, "link", "set", each, "up")


def _ip(*arguments: str) -> None:
    """Raises BenchmarkError."""
    ended = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if ended.returncode:
        raise BenchmarkError(f"ip {' '.join(arguments)}: {ended.stderr.strip()}")
