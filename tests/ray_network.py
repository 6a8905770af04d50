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
from ray_cluster import PROXY_PATIENCE, WAIT_SECONDS, living_with

from benchmarks.errors import BenchmarkError
from carrel.process.version import CHECKOUT

PORT = 6379
STARTS = 4
OBJECT_STORE_BYTES = "80000000"
# nets that nothing else here is likely to be on: one of Ray's own, one that clients are on
SUBNETS = {"private": "10.78.16", "public": "10.78.17"}
# the bridges have a namespace of their own, so that no firewall of this machine decides what hosts send each other
SWITCH = "cn-switch"


def can_make_networks() -> bool:
    """Return whether this process may make network namespaces."""
    name = f"cn-try-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    except FileNotFoundError:
        return False
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


@dataclass(frozen=True)
class Host:
    """One node's namespace, with a link to each net."""

    number: int

    @property
    def name(self) -> str:
        return f"cn{self.number}"

    @property
    def address(self) -> str:
        """The private one, which Ray is given."""
        return f"{SUBNETS['private']}.{self.number + 1}"

    @property
    def public_address(self) -> str:
        return f"{SUBNETS['public']}.{self.number + 1}"

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
        self._set_links("down")

    def join(self) -> None:
        """Packets go in and out again."""
        self._set_links("up")

    def _set_links(self, state: str) -> None:
        for net in SUBNETS:
            _ip("-n", SWITCH, "link", "set", f"{self.name}-{net}", state)


class Network:
    """Hosts that reach each other and are reached from here; host 0 has Ray's head."""

    def __init__(self, hosts: tuple[Host, ...], environment: Mapping[str, str], folder: Path) -> None:
        self.hosts = hosts
        self._environment = {**environment, "RAY_ADDRESS": f"{hosts[0].address}:{PORT}"}
        self._folder = folder

    def start_ray(self, host: Host, cpus: int = 2, address: str = "", has_dashboard: bool = False) -> None:
        """A node there, at its private address without another one. Ray gives it 30 s to come up, which a busy machine
        may not have: then once more. Raises BenchmarkError."""
        dashboard = "--dashboard-host=127.0.0.1" if has_dashboard else "--include-dashboard=false"
        head = ("--head", f"--port={PORT}", dashboard)
        where = head if host.number == 0 else (f"--address={self.hosts[0].address}:{PORT}",)
        command = (
            "ray",
            "start",
            *where,
            f"--node-ip-address={address or host.address}",
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
def network(number: int, variables: Mapping[str, str] | None = None) -> Iterator[Network]:
    """Make `number` hosts with these variables until the block ends; nothing of theirs is left then.

    Needs rights to make namespaces.
    """
    hosts = tuple(Host(each) for each in range(number))
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
            **(variables or {}),
        }
        try:
            _ip("netns", "add", SWITCH)
            for net in SUBNETS:
                _ip("-n", SWITCH, "link", "add", net, "type", "bridge")
                _ip("-n", SWITCH, "link", "set", net, "up")
                _plug((), f"cn-{net}", "here", net, 254)
            for host in hosts:
                _attach(host)
            yield Network(hosts, environment, Path(folder))
        finally:
            for host in hosts:
                host.kill()
            for net in SUBNETS:
                subprocess.run(["ip", "link", "del", f"cn-{net}"], capture_output=True)
            for name in (*(host.name for host in hosts), SWITCH):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _attach(host: Host) -> None:
    _ip("netns", "add", host.name)
    _ip("-n", host.name, "link", "set", "lo", "up")
    for net in SUBNETS:
        _plug(("-n", host.name), net, host.name, net, host.number + 1)


def _plug(where: tuple[str, ...], link: str, name: str, net: str, number: int) -> None:
    """A link from a namespace to a bridge: `name`-`net` at the switch."""
    _ip(*where, "link", "add", link, "type", "veth", "peer", "name", f"{name}-{net}", "netns", SWITCH)
    _ip("-n", SWITCH, "link", "set", f"{name}-{net}", "master", net, "up")
    _ip(*where, "addr", "add", f"{SUBNETS[net]}.{number}/24", "dev", link)
    _ip(*where, "link", "set", link, "up")


def _ip(*arguments: str) -> None:
    """Raises BenchmarkError."""
    ended = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if ended.returncode:
        raise BenchmarkError(f"ip {' '.join(arguments)}: {ended.stderr.strip()}")
