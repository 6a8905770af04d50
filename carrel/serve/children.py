"""The three processes of one box: their commands, sockets and deadlines, and how to learn that each serves."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from carrel.process.command_line import CONFIG, arguments
from carrel.process.options import spellings, variable
from carrel.process.settings import validate
from carrel.process.version import CHECKOUT
from carrel.serve.endpoints import Endpoints
from carrel.serve.options import ServeOptions
from carrel.serve.process import ChildSpec
from gateway.config import GatewayConfig
from gpu_worker.config import WorkerConfig
from kv_store.config import StoreConfig

STORE, WORKER, GATEWAY = "store", "worker", "gateway"
CHECKS = {STORE: "kv_store.check", WORKER: "gpu_worker.startup", GATEWAY: "gateway.check"}
# above the store's own limits, two tries of Ray and its actor: its own message names the cause
STORE_START_S = 600.0
# a large model may have to be downloaded and read first
WORKER_START_S = 3600.0
GATEWAY_START_S = 180.0
STOP_S = 20.0
# at a second signal the gateway ends its streams with an error, for which clients have two seconds
HURRY_S = 4.0
PROBE_TIMEOUT_S = 1.0
# in the commands
MODULE_PLACE = 3
T = TypeVar("T")


def child_specs(model: str, texts: Mapping[str, str], endpoints: Endpoints) -> tuple[ChildSpec, ...]:
    """Store, worker and gateway, in the order in which they start. `texts`: what options were given, by field.

    Each process's options are read here as it will read them: it starts minutes after a mistake could have been told.
    Raises OptionError.
    """
    worker = worker_spec(model, texts, endpoints)
    return (
        store_spec(texts, endpoints, worker.hang_timeout_s),
        worker,
        gateway_spec(model, texts, endpoints, worker.hang_timeout_s),
    )


def other_program(spec: ChildSpec, module: str, own: Sequence[str] = ()) -> ChildSpec:
    """A program that reads a process's options, does one thing and ends. own: its own words beside them."""
    argv = (*spec.argv[:MODULE_PLACE], module, *spec.argv[MODULE_PLACE + 1 :], *own)
    return replace(spec, name=module.rpartition(".")[2], argv=argv)


def check_specs(specs: Sequence[ChildSpec]) -> list[ChildSpec]:
    """Programs with the options of these processes that end with 2, and a reason, where those would."""
    return [other_program(spec, CHECKS[spec.name]) for spec in specs]


def store_spec(texts: Mapping[str, str], endpoints: Endpoints, hang_timeout_s: float = 0.0) -> ChildSpec:
    wired = {"listen": f"unix:{endpoints.store_socket}"}
    config, argv = _command("kv_store", StoreConfig, {"runtime": "ray", **texts, **wired})
    return ChildSpec(
        STORE,
        argv,
        lambda: serves(endpoints.store_socket),
        STORE_START_S,
        STOP_S,
        {"RAY_USAGE_STATS_ENABLED": "0"},
        loss="the KV cache of running requests, and what later prompts would have shared",
        clean=lambda: remove_ray_folders(endpoints.run),
        # it has a Ray to end, whose helpers would outlive it by a minute
        death_signal=signal.SIGTERM,
        # until its leases have run out it may come back with all that it holds
        hang_timeout_s=hang_timeout_s and hang_timeout_s + config.lease_seconds,
    )


def worker_spec(model: str, texts: Mapping[str, str], endpoints: Endpoints) -> ChildSpec:
    wired = {
        "model": model,
        "listen": f"unix:{endpoints.worker_socket}",
        "store": f"unix:{endpoints.store_socket}",
    }
    config, argv = _command("gpu_worker", WorkerConfig, {**texts, **wired})
    return ChildSpec(
        WORKER,
        argv,
        lambda: serves(endpoints.worker_socket),
        WORKER_START_S,
        config.shutdown_timeout_s + STOP_S,
        loss="the running requests",
        hang_timeout_s=config.hang_timeout_s,
    )


def gateway_spec(
    model: str, texts: Mapping[str, str], endpoints: Endpoints, hang_timeout_s: float = 0.0
) -> ChildSpec:
    wired = {
        "model": model,
        "worker": f"unix:{endpoints.worker_socket}",
        "port": str(endpoints.port),
        "grpc_port": str(endpoints.grpc_port),
        "log_level": texts.get("log_level", ServeOptions.log_level),
    }
    config, argv = _command("gateway", GatewayConfig, {**texts, **wired})
    return ChildSpec(
        GATEWAY,
        argv,
        lambda: http_status(endpoints, "/ready") == httpx.codes.OK,
        GATEWAY_START_S,
        config.shutdown_timeout_s + STOP_S,
        # a key on the command line would be in every process listing
        {"CARREL_API_KEY": texts["api_keys"]} if config.api_keys else {},
        loss="the clients' connections, and their requests",
        hang_timeout_s=hang_timeout_s,
        # whatever it says of the worker
        answers=lambda: http_status(endpoints, "/health") is not None,
        hurry_timeout_s=HURRY_S,
    )


def served_name(model: str, texts: Mapping[str, str]) -> str:
    """Return the model's name in the gateway's answers."""
    return validate(GatewayConfig, {**texts, "model": model, "worker": "unix:-"}).model_names[0]


def remove_ray_folders(run: Path) -> None:
    """Remove what a killed store's Ray leaves; stale sockets are replaced by the next process that listens there."""
    for folder in run.glob("ray-*"):
        shutil.rmtree(folder, ignore_errors=True)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The children's environment: what was resolved reaches them as flags, so its variables are left out.

    Our packages come first on their path, installed or not.
    """
    known = {variable(name) for name in (*spellings(ServeOptions), CONFIG)}
    path = [str(CHECKOUT), *filter(None, [environment.get("PYTHONPATH")])]
    kept = {key: value for key, value in environment.items() if key not in known}
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def _command(module: str, kind: type[T], texts: Mapping[str, str]) -> tuple[T, tuple[str, ...]]:
    """A process's options as it will read them, and the command that starts it. Its log is text, unless told."""
    given = {"log_format": "text", **texts, "json_events": "true"}
    # -P: a folder named gateway where the user happens to stand is not our gateway
    return validate(kind, given), (sys.executable, "-P", "-m", module, *arguments(kind, given))


def serves(socket: Path) -> bool:
    """Return whether a process serves behind a Unix socket, by grpc.health.v1."""
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


def http_status(endpoints: Endpoints, path: str) -> int | None:
    """Return the status with which the gateway answers; None when it does not answer."""
    try:
        with endpoints.client(PROBE_TIMEOUT_S) as client:
            return client.get(path).status_code
    except httpx.HTTPError:
        return None
