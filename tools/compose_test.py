"""Try compose.yaml for real: up, ask, train, restart the store, kill each process, drain, take everything down.

`python -m tools.compose_test [--no-build] [--output FILE]`; needs a Docker engine with Compose 2 or 1.29.2. The
question is that of examples/documents, about one sentence in 8K tokens, under bitkeys; the answer must be right each
time, over REST and over gRPC. In the store's container Ray must run the store, and trainers of low priority.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from carrel.evaluation.about import describe
from carrel.process.version import CHECKOUT
from tools.compose import faults
from tools.compose.actors import check_actors, train_index
from tools.compose.asking import ask
from tools.compose.deployment import (
    LABEL,
    SERVICES,
    STORE,
    CheckFailed,
    Deployment,
    compose_version,
    docker,
    wait_until,
)
from tools.compose.faults import Drain, Fault

KILLS = (faults.kill_worker, faults.kill_store, faults.kill_store_actor, faults.kill_gateway)
CONTAINMENT = {
    "no root user": "test $(id -u) -ne 0",
    "read-only root file system": "grep -q '^[^ ]* / [^ ]* ro[, ]' /proc/mounts",
    "no capabilities": "grep -q '^CapBnd:[[:space:]]*0*$' /proc/1/status",
    "no new privileges": "grep -q '^NoNewPrivs:[[:space:]]*1$' /proc/1/status",
}
START_S = 300.0


@dataclass
class Report:
    """The results so far, to be read later."""

    steps: dict[str, float] = field(default_factory=dict)
    images: list[dict[str, Any]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    drains: list[Drain] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time and print a step; one that fails is not counted."""
        started = time.monotonic()
        yield
        self.steps[name] = round(time.monotonic() - started, 1)
        print(f"compose-test: {name}: {self.steps[name]} s", flush=True)

    def as_json(self) -> dict[str, Any]:
        about = describe("cpu") | {
            "command": shlex.join(["python", "-m", "tools.compose_test", *sys.argv[1:]]),
            "engine": docker("version", "--format", "{{.Server.Version}}"),
            "compose": compose_version(),
        }
        return {"benchmark": "compose", "about": about} | asdict(self)


def check_containment(deployment: Deployment) -> None:
    """Raises CheckFailed for a container in which the kernel does not hold what compose.yaml asks for."""
    for service in SERVICES:
        for wanted, test in CONTAINMENT.items():
            if deployment.inside(service, test) != 0:
                raise CheckFailed(f"{service}: {wanted} does not hold")


def restart_store(deployment: Deployment) -> None:
    deployment.compose("restart", STORE)
    wait_until("the store is healthy again", lambda: deployment.health(STORE) == "healthy", START_S)
    wait_until("the gateway is ready again", deployment.is_ready, START_S)


def check_found_on_disk(num_known: int) -> None:
    """Raises CheckFailed when a store that was started again had nothing of the document."""
    print(f"compose-test: the new store had {num_known} tokens of the document", flush=True)
    if num_known == 0:
        raise CheckFailed("the store's disk tier did not keep the document over a restart")


def check_nothing_left() -> None:
    """Raises CheckFailed, naming the kind, for a container, volume or network of this project."""
    for kind in (["ps", "--all"], ["volume", "ls"], ["network", "ls"]):
        if left := docker(*kind, "--quiet", "--filter", LABEL):
            raise CheckFailed(f"docker {' '.join(kind)} still shows {left.split()}")


def base_image() -> str:
    """That our images are built on, by its digest."""
    lines = (CHECKOUT / "docker" / "gateway.Dockerfile").read_text().splitlines()
    return next(line.removeprefix("ARG PYTHON=") for line in lines if line.startswith("ARG PYTHON="))


def seen_of_images() -> list[dict[str, Any]]:
    """Name and bytes of the images that ran, the base's first."""
    base = os.environ.get("CARREL_PYTHON_IMAGE") or base_image()
    names = docker("ps", "--all", "--filter", LABEL, "--format", "{{.Image}}").split()
    sizes = {
        name: docker("image", "inspect", "--format", "{{.Size}}", name) for name in (base, *sorted(names))
    }
    return [{"name": name, "bytes": int(size)} for name, size in sizes.items()]


def run(deployment: Deployment, report: Report, is_built: bool) -> None:
    if not is_built:
        with report.step("build"):
            deployment.compose("build")
    try:
        with report.step("up, until ready"):
            deployment.compose("up", "--detach", "--no-build")
            wait_until("the gateway is ready", deployment.is_ready, START_S)
        report.images = seen_of_images()
        with report.step("containment"):
            check_containment(deployment)
        with report.step("see Ray run the store"):
            check_actors(deployment)
        with report.step("ask over REST and gRPC"):
            ask(deployment)
        with report.step("train an index"):
            train_index(deployment)
        with report.step("restart the store"):
            restart_store(deployment)
        with report.step("ask again"):
            check_found_on_disk(ask(deployment))
        for kill in KILLS:
            with report.step(kill.__name__.replace("_", " ")):
                report.faults.append(kill(deployment))
        with report.step("stop the gateway under streams"):
            report.drains.append(faults.stop_gateway(deployment))
        with report.step("stop all under streams"):
            report.drains.append(faults.stop_all(deployment))
    except CheckFailed:
        deployment.compose("logs", "--tail", "50")
        raise
    finally:
        with report.step("down"):
            deployment.compose("down", "--volumes")
    check_nothing_left()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-build", action="store_true", help="the images are there already")
    parser.add_argument("--output", type=Path, metavar="FILE", help="what was seen, as JSON")
    options = parser.parse_args(arguments)
    report = Report()
    # so that a test that is ended takes its containers down
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run(Deployment(), report, options.no_build)
        if options.output:
            options.output.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    except CheckFailed as exc:
        print(f"compose-test: {exc}", file=sys.stderr)
        return 1
    print("compose-test: passed, nothing left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
