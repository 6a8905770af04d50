"""Try compose.yaml for real: build, start the cpu profile, ask, restart the store, ask again, take everything down.

`python -m tools.compose_test [--no-build]`; needs a Docker engine with Compose 2 or 1.29.2. The question is that of
examples/documents, about one sentence in 8K tokens, under pqcache; the answer must be right over REST and over gRPC.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import httpx

from gateway.v1 import chat_pb2, chat_pb2_grpc

ROOT = Path(__file__).resolve().parents[1]
REQUEST = ROOT / "examples" / "documents" / "request.json"
# what tools/make_request.py put into the document
ANSWER = "48213"
LEAST_OFFLOADED_TOKENS = 8000
PROJECT = f"carrel-test-{os.getpid()}"
LABEL = f"label=com.docker.compose.project={PROJECT}"
SERVICES = ("kv-store", "worker-cpu", "gateway-cpu")
CONTAINMENT = {
    "no root user": "test $(id -u) -ne 0",
    "read-only root file system": "grep -q '^[^ ]* / [^ ]* ro[, ]' /proc/mounts",
    "no capabilities": "grep -q '^CapBnd:[[:space:]]*0*$' /proc/1/status",
    "no new privileges": "grep -q '^NoNewPrivs:[[:space:]]*1$' /proc/1/status",
}
START_S = 300.0
ANSWER_S = 600.0


class TestFailed(Exception):
    """What was asked of the containers did not hold."""


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
        }

    def compose(self, *arguments: str) -> None:
        """Run one compose command. Raises TestFailed."""
        command = [*self._compose, *arguments]
        # its progress goes where ours goes
        if status := subprocess.run(command, cwd=ROOT, env=self._environment).returncode:
            raise TestFailed(f"{' '.join(command)} ended with {status}")

    def inside(self, service: str, *command: str) -> int:
        """Exit status of a command in a running container."""
        return subprocess.run(
            [*self._compose, "exec", "-T", service, *command],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
        ).returncode

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (
                httpx.get(f"http://127.0.0.1:{self.port}/ready", trust_env=False).status_code
                == httpx.codes.OK
            )
        return False

    def health(self, service: str) -> str:
        """`healthy`, `starting` or `unhealthy`."""
        found = docker(
            "ps",
            "--quiet",
            "--filter",
            LABEL,
            "--filter",
            f"label=com.docker.compose.service={service}",
        )
        return docker("inspect", "--format", "{{.State.Health.Status}}", *found.split()) if found else ""


def find_compose() -> list[str]:
    """`docker compose`, or the older docker-compose. Raises TestFailed."""
    for command in (["docker", "compose"], ["docker-compose"]):
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*command, "version"], capture_output=True).returncode == 0:
                return command
    raise TestFailed("neither `docker compose` nor docker-compose can be run: install one")


def docker(*arguments: str) -> str:
    """What one docker command prints. Raises TestFailed."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise TestFailed(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"compose-test: {name}: {time.monotonic() - started:.1f} s", flush=True)


def wait_until(what: str, holds: Callable[[], bool], seconds: float) -> None:
    """Raises TestFailed when it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TestFailed(f"{what}: not within {seconds:g} s")
        time.sleep(0.5)


def ask_by_rest(deployment: Deployment) -> None:
    body = json.loads(REQUEST.read_text()) | {"stream": False}
    del body["stream_options"]
    reply = httpx.post(
        f"http://127.0.0.1:{deployment.port}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {deployment.key}"},
        timeout=ANSWER_S,
        trust_env=False,
    )
    if reply.status_code != httpx.codes.OK:
        raise TestFailed(f"REST: {reply.status_code} {reply.text}")
    found = reply.json()
    used = found["usage"]["carrel"]
    check_answer(
        "REST",
        found["choices"][0]["message"]["content"],
        used["policy"],
        used["offloaded_tokens"],
        used["bytes_moved"],
    )


def ask_by_grpc(deployment: Deployment) -> None:
    body = json.loads(REQUEST.read_text())
    request = chat_pb2.ChatRequest(
        messages=[chat_pb2.Message(**message) for message in body["messages"]],
        temperature=body["temperature"],
        carrel=chat_pb2.CarrelOptions(policy=body["carrel"]["policy"], budget_share=body["carrel"]["budget"]),
    )
    answer, used = "", None
    with grpc.insecure_channel(f"127.0.0.1:{deployment.grpc_port}") as channel:
        metadata = (("authorization", f"Bearer {deployment.key}"),)
        try:
            for event in chat_pb2_grpc.ChatStub(channel).Complete(
                request, metadata=metadata, timeout=ANSWER_S
            ):
                if event.HasField("delta"):
                    answer += event.delta.content
                elif event.HasField("complete"):
                    used = event.complete.usage.carrel
                else:
                    raise TestFailed(f"gRPC: {event}")
        except grpc.RpcError as exc:
            raise TestFailed(f"gRPC: {exc}") from exc
    if used is None:
        raise TestFailed("gRPC: the stream ended without an account")
    check_answer("gRPC", answer, used.policy, used.offloaded_tokens, used.bytes_moved)


def check_answer(how: str, answer: str, policy: str, offloaded_tokens: int, bytes_moved: int) -> None:
    """Raises TestFailed unless the answer is right and came out of the arena."""
    shown = f"{how}: {answer!r} under {policy}, {offloaded_tokens} tokens offloaded, {bytes_moved} bytes back"
    if answer.strip() != ANSWER:
        raise TestFailed(f"{shown}: {ANSWER} is right")
    if policy != "pqcache" or offloaded_tokens < LEAST_OFFLOADED_TOKENS or bytes_moved == 0:
        raise TestFailed(f"{shown}: rows were to go through the arena")
    print(f"compose-test: {shown}", flush=True)


def check_containment(deployment: Deployment) -> None:
    """Raises TestFailed for a container in which the kernel does not hold what compose.yaml asks for."""
    for service in SERVICES:
        for wanted, test in CONTAINMENT.items():
            if deployment.inside(service, "sh", "-c", test) != 0:
                raise TestFailed(f"{service}: {wanted} does not hold")


def restart_store(deployment: Deployment) -> None:
    deployment.compose("restart", "kv-store")
    wait_until("the store is healthy again", lambda: deployment.health("kv-store") == "healthy", START_S)
    wait_until("the gateway is ready again", deployment.is_ready, START_S)


def check_exit_codes() -> None:
    """Raises TestFailed unless every process drained and ended by itself."""
    names = docker("ps", "--all", "--quiet", "--filter", LABEL).split()
    codes = docker("inspect", "--format", "{{.Name}} {{.State.ExitCode}}", *names).splitlines()
    if len(codes) != len(SERVICES) or any(not code.endswith(" 0") for code in codes):
        raise TestFailed(f"stopped with {codes}")


def check_nothing_left() -> None:
    """Raises TestFailed, naming the kind, for a container, volume or network of this project."""
    for kind in (["ps", "--all"], ["volume", "ls"], ["network", "ls"]):
        if left := docker(*kind, "--quiet", "--filter", LABEL):
            raise TestFailed(f"docker {' '.join(kind)} still shows {left.split()}")


def run(deployment: Deployment, is_built: bool) -> None:
    if not is_built:
        with step("build"):
            deployment.compose("build")
    try:
        with step("up, until ready"):
            deployment.compose("up", "--detach", "--no-build")
            wait_until("the gateway is ready", deployment.is_ready, START_S)
        with step("containment"):
            check_containment(deployment)
        with step("ask over REST"):
            ask_by_rest(deployment)
        with step("ask over gRPC"):
            ask_by_grpc(deployment)
        with step("restart the store"):
            restart_store(deployment)
        with step("ask again"):
            ask_by_rest(deployment)
            ask_by_grpc(deployment)
        with step("stop"):
            deployment.compose("stop")
            check_exit_codes()
    except TestFailed:
        deployment.compose("logs", "--tail", "50")
        raise
    finally:
        with step("down"):
            deployment.compose("down", "--volumes")
    check_nothing_left()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-build", action="store_true", help="the images are there already")
    options = parser.parse_args(arguments)
    try:
        run(Deployment(), options.no_build)
    except TestFailed as exc:
        print(f"compose-test: {exc}", file=sys.stderr)
        return 1
    print("compose-test: passed, nothing left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
