"""A deployment of compose.yaml's cpu profile, and what Docker says of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
PROJECT = f"carrel-test-{os.getpid()}"
LABEL = f"label=com.docker.compose.project={PROJECT}"
STORE, WORKER, GATEWAY = SERVICES = ("kv-store", "worker-cpu", "gateway-cpu")
# any docker command that builds nothing
DOCKER_S = 120.0
READY_S = 10.0
# where the volume of the store's disk tier is
DISK = "/var/lib/carrel/store"
# tini has one child: the service
KILL = (
    "for s in /proc/[0-9]*/status; do if grep -q '^PPid:[[:space:]]*1$' $s; then "
    "p=${s#/proc/}; kill -KILL ${p%/status}; fi; done"
)
KILL_STORE_ACTOR = (
    "for c in /proc/[0-9]*/cmdline; do if grep -q '^ray::StoreActor' $c; then "
    "p=${c#/proc/}; kill -KILL ${p%/cmdline}; fi; done"
)
EPOCH = """
import socket
from kv_store.client.handoff import HEADER, ArenaHandle
with socket.socket(socket.AF_UNIX) as peer:
    peer.settimeout(10)
    peer.connect("/run/carrel/store/arena.sock")
    header, *_ = socket.recv_fds(peer, HEADER.size, 1)
print(ArenaHandle.unpack(header).epoch)
"""


class CheckFailed(Exception):
    """A check of the containers failed."""


class Deployment:
    """The cpu profile under a project name and on ports of its own, so that no other deployment is touched."""

    def __init__(self) -> None:
        self.key = secrets.token_hex(16)
        self.port, self.grpc_port = free_ports(2)
        self._compose = [*find_compose(), "--project-name", PROJECT, "--env-file", str(ROOT / ".env.example")]
        self._environment = os.environ | {
            "COMPOSE_PROFILES": "cpu",
            "CARREL_PORT": str(self.port),
            "CARREL_GRPC_PORT": str(self.grpc_port),
            "CARREL_API_KEY": self.key,
            "CARREL_KV_STORE_PATH": DISK,
        }

    def compose(self, *arguments: str) -> None:
        """Run one compose command. Raises CheckFailed."""
        command = [*self._compose, *arguments]
        # its progress goes where ours goes
        if status := subprocess.run(command, cwd=ROOT, env=self._environment).returncode:
            raise CheckFailed(f"{' '.join(command)} ended with {status}")

    def container(self, service: str) -> str:
        """Id of the service's container, running or not. Raises CheckFailed."""
        wanted = f"label=com.docker.compose.service={service}"
        found = docker("ps", "--all", "--quiet", "--filter", LABEL, "--filter", wanted).split()
        if len(found) != 1:
            raise CheckFailed(f"{service} has {len(found)} containers")
        return found[0]

    def inspect(self, service: str, field: str) -> str:
        """One field of `docker inspect`, such as State.ExitCode."""
        return docker("inspect", "--format", f"{{{{.{field}}}}}", self.container(service))

    def health(self, service: str) -> str:
        """`healthy`, `starting` or `unhealthy`."""
        return self.inspect(service, "State.Health.Status")

    def is_healthy(self) -> bool:
        """Docker says so of every container."""
        return all(self.health(service) == "healthy" for service in SERVICES)

    def inside(self, service: str, script: str) -> int:
        """Exit status of a shell script in a running container, as the service's user."""
        command = ["docker", "exec", self.container(service), "sh", "-c", script]
        return subprocess.run(command, capture_output=True, timeout=DOCKER_S).returncode

    def kill(self, service: str) -> None:
        """SIGKILL the service's process, not its container: what `docker kill` ends stays ended on some engines."""
        self.inside(service, KILL)

    def kill_store_actor(self) -> None:
        """SIGKILL the process in which Ray runs the store; the service's own is another."""
        self.inside(STORE, KILL_STORE_ACTOR)

    def epoch(self) -> int:
        """Return the running store's epoch, from its arena socket. Raises CheckFailed."""
        return int(docker("exec", self.container(STORE), "python", "-c", EPOCH))

    def logs(self, service: str) -> str:
        """All that the service's container has written, in all of its lives."""
        command = ["docker", "logs", self.container(service)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DOCKER_S
        )
        return done.stdout

    def readiness(self) -> int:
        """The status of /ready; 0 without an answer."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(
                f"http://127.0.0.1:{self.port}/ready", timeout=READY_S, trust_env=False
            ).status_code
        return 0

    def is_ready(self) -> bool:
        return self.readiness() == httpx.codes.OK


def find_compose() -> list[str]:
    """`docker compose`, or the older docker-compose. Raises CheckFailed."""
    for command in (["docker", "compose"], ["docker-compose"]):
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*command, "version"], capture_output=True).returncode == 0:
                return command
    raise CheckFailed("neither `docker compose` nor docker-compose can be run: install one")


def compose_version() -> str:
    """Such as 1.29.2. Raises CheckFailed."""
    done = subprocess.run([*find_compose(), "version", "--short"], capture_output=True, text=True)
    return done.stdout.strip()


def docker(*arguments: str) -> str:
    """Run a docker command and return its output. Raises CheckFailed."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=DOCKER_S)
    if done.returncode:
        raise CheckFailed(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def wait_until(what: str, holds: Callable[[], bool], seconds: float) -> None:
    """Raises CheckFailed when it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise CheckFailed(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)
