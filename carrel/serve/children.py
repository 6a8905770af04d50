"""The three processes of one box: their commands, sockets and deadlines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carrel.errors import OptionError
from carrel.process.version import CHECKOUT
from carrel.serve.flags import GATEWAY, STORE, WORKER
from carrel.serve.options import ServeOptions, child_arguments
from carrel.serve.ports import reachable_host
from carrel.serve.process import ChildSpec
from carrel.serve.readiness import grpc_serving, http_ready
from carrel.serve.resolve import environment_keys
from gateway.config import parse_config
from gateway.errors import ConfigError

STORE_START_S = 180.0
# a large model may have to be downloaded and read first
WORKER_START_S = 3600.0
GATEWAY_START_S = 180.0
STOP_S = 20.0
# python -P -m package
COMMAND_LENGTH = 4


@dataclass(frozen=True)
class Endpoints:
    """Where everything listens. Both ports are real ones."""

    run: Path
    host: str
    port: int
    grpc_port: int

    @property
    def store_socket(self) -> Path:
        return self.run / "kv_store.sock"

    @property
    def worker_socket(self) -> Path:
        return self.run / "gpu_worker.sock"

    @property
    def url(self) -> str:
        return f"http://{reachable_host(self.host)}:{self.port}"


def child_specs(model: str, options: ServeOptions, endpoints: Endpoints) -> tuple[ChildSpec, ...]:
    """Store, worker and gateway, in the order in which they start."""
    return (
        store_spec(options, endpoints),
        worker_spec(model, options, endpoints),
        gateway_spec(model, options, endpoints),
    )


def store_spec(options: ServeOptions, endpoints: Endpoints) -> ChildSpec:
    return ChildSpec(
        STORE,
        _command(
            "kv_store",
            "--listen",
            f"unix:{endpoints.store_socket}",
            "--runtime",
            "ray",
            *child_arguments(options, STORE),
        ),
        grpc_serving(endpoints.store_socket),
        STORE_START_S,
        STOP_S,
        {"RAY_USAGE_STATS_ENABLED": "0"},
        loss="the KV cache of running requests, and what later prompts would have shared",
        clean=lambda: remove_ray_folders(endpoints.run),
    )


def worker_spec(model: str, options: ServeOptions, endpoints: Endpoints) -> ChildSpec:
    return ChildSpec(
        WORKER,
        _command(
            "gpu_worker",
            model,
            "--listen",
            f"unix:{endpoints.worker_socket}",
            "--store",
            f"unix:{endpoints.store_socket}",
            *child_arguments(options, WORKER),
        ),
        grpc_serving(endpoints.worker_socket),
        WORKER_START_S,
        options.shutdown_timeout + STOP_S,
        loss="the running requests",
    )


def gateway_spec(model: str, options: ServeOptions, endpoints: Endpoints) -> ChildSpec:
    return ChildSpec(
        GATEWAY,
        _command(
            "gateway",
            "--model",
            model,
            "--worker",
            f"unix:{endpoints.worker_socket}",
            "--port",
            str(endpoints.port),
            "--grpc-port",
            str(endpoints.grpc_port),
            *child_arguments(options, GATEWAY),
        ),
        http_ready(endpoints.url),
        GATEWAY_START_S,
        options.shutdown_timeout + STOP_S,
        # a key on the command line would be in every process listing
        {"CARREL_API_KEY": options.api_key} if options.api_key else {},
        loss="the clients' connections, and their requests",
    )


def remove_ray_folders(run: Path) -> None:
    """Remove what a killed store's Ray leaves; stale sockets are replaced by the next process that listens there."""
    for folder in run.glob("ray-*"):
        shutil.rmtree(folder, ignore_errors=True)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The children's environment: what was resolved reaches them as flags, so its variables are left out.

    Our packages come first on their path, installed or not.
    """
    path = [str(CHECKOUT), *filter(None, [environment.get("PYTHONPATH")])]
    kept = {key: value for key, value in environment.items() if key not in environment_keys()}
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def check_gateway(specs: Sequence[ChildSpec], environment: Mapping[str, str]) -> None:
    """Let the gateway read its options now: it starts last, minutes after a mistake could have been reported.

    Raises OptionError.
    """
    spec = next(spec for spec in specs if spec.name == GATEWAY)
    try:
        parse_config(spec.argv[COMMAND_LENGTH:], {**environment, **spec.environment})
    except ConfigError as exc:
        raise OptionError(str(exc)) from exc


def _command(module: str, *arguments: str) -> tuple[str, ...]:
    # -P: a folder named gateway where the user happens to stand is not our gateway
    return (sys.executable, "-P", "-m", module, *arguments, "--json-events")
