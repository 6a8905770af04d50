"""compose.yaml and the Dockerfiles hold what docs and issue promise, as far as reading them can tell.

`make compose-test` starts the containers; that needs an engine.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from checkout import ROOT
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from waiting import PATIENCE

from carrel.process.options import options_of
from gateway.config import GatewayConfig
from gpu_worker.config import WorkerConfig
from kv_store.config import StoreConfig
from kv_store.config import parse_config as parse_store

TEXT = (ROOT / "compose.yaml").read_text()
EXAMPLE = (ROOT / ".env.example").read_text()
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
# fixed by compose.yaml: where processes listen, what they run on, who supervises them
FIXED = {"listen", "store", "allow_remote", "store_timeout", "device", "json_events", "worker", "host"}
FIXED |= {"runtime", "arena_socket", "max_restarts", "store_token", "store_token_file"}
FIXED |= {"store_ca_file", "allow_plain_store", "store_ssl_keyfile", "store_ssl_certfile"}
FIXED |= {"worker_ssl_keyfile", "worker_ssl_certfile", "worker_client_ca_file"}
FIXED |= {"worker_ca_file", "worker_client_keyfile", "worker_client_certfile", "allow_plain_worker"}
# a proxy in front has TLS; experiments start their own worker
FIXED |= {"uds", "ssl_keyfile", "ssl_certfile", "granularity"}
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?-)([^}]*))?\}")
ENDING_S = 20.0
# the least that Ray takes is 75 MiB
OBJECT_STORE_BYTES = 80_000_000


def filled_in(value: Any) -> Any:
    """`value` with every variable replaced by its default."""
    if isinstance(value, dict):
        return {key: filled_in(item) for key, item in value.items()}
    if isinstance(value, list):
        return [filled_in(item) for item in value]
    return VARIABLE.sub(lambda found: found[3] or "", value) if isinstance(value, str) else value


COMPOSE = filled_in(yaml.safe_load(TEXT))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
# images of others, which know nothing of ours
MONITORING = {"prometheus", "grafana"}
OURS = {name: service for name, service in SERVICES.items() if name not in MONITORING}
EACH = pytest.mark.parametrize("service", SERVICES.values(), ids=list(SERVICES))
EACH_DOCKERFILE = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)


def seconds(duration: str) -> float:
    return sum(
        float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
        for number, unit in re.findall(r"([\d.]+)([smh])", duration)
    )


@EACH
def test_a_service_is_contained(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["restart"] == "unless-stopped"
    assert not {"privileged", "ipc", "pid", "userns_mode"} & service.keys()
    assert service.get("user", "10001").split(":")[0] not in ("0", "root")
    assert service.get("network_mode") in (None, "none")


def test_only_the_gateways_ports_are_published_and_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    of_gateway = ["127.0.0.1:8000:8000", "127.0.0.1:8001:8001"]
    assert published == {
        "gateway-cpu": of_gateway,
        "gateway-gpu": of_gateway,
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_host_folders_are_read_only() -> None:
    for service in SERVICES.values():
        for mount in service["volumes"]:
            source, _, options = mount.split(":")[0], mount.split(":")[1], mount.split(":")[2:]
            assert source in COMPOSE["volumes"] or options == ["ro"]


@EACH
def test_a_service_is_watched_and_starts_after_a_healthy_one(service: dict[str, Any]) -> None:
    probe = service["healthcheck"]
    checks = {("CMD", "python", "/opt/carrel/healthcheck.py"), ("CMD", "wget", "--quiet")}
    assert tuple(probe["test"][:3]) in checks
    assert {"interval", "timeout", "retries", "start_period"} < probe.keys()
    for other, how in service.get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        # a profile that is on must have all it depends on
        assert set(service["profiles"]) <= set(SERVICES[other]["profiles"])


def test_they_start_store_then_worker_then_gateway() -> None:
    for profile in ("cpu", "gpu"):
        assert SERVICES[f"gateway-{profile}"]["depends_on"].keys() == {f"worker-{profile}"}
        assert SERVICES[f"worker-{profile}"]["depends_on"].keys() == {"kv-store"}
    assert "depends_on" not in SERVICES["kv-store"]


@EACH
def test_docker_waits_longer_than_a_drain_takes(service: dict[str, Any]) -> None:
    drain = max(
        GatewayConfig(model="m", worker="unix:w").shutdown_timeout_s,
        WorkerConfig(model="m", listen="unix:/w", store="unix:/s").shutdown_timeout_s,
    )
    assert seconds(service["stop_grace_period"]) >= drain + ENDING_S


def test_sockets_are_shared_by_those_who_talk_and_no_others() -> None:
    for profile in ("cpu", "gpu"):
        mounts = {
            name: {mount.split(":")[0] for mount in SERVICES[name]["volumes"]}
            for name in ("kv-store", f"worker-{profile}", f"gateway-{profile}")
        }
        assert "store-run" in mounts["kv-store"] & mounts[f"worker-{profile}"]
        assert "worker-run" in mounts[f"worker-{profile}"] & mounts[f"gateway-{profile}"]
        assert "worker-run" not in mounts["kv-store"]
        assert "store-run" not in mounts[f"gateway-{profile}"]


def test_ray_runs_the_store_with_room_for_its_object_store_and_threads() -> None:
    service = SERVICES["kv-store"]
    assert parse_store(service["command"]).runtime == "ray"
    assert [name for name, each in SERVICES.items() if "shm_size" in each] == ["kv-store"]
    # below that Ray takes the tmpfs, which its logs fill
    assert int(service["shm_size"].removesuffix("m")) << 20 > OBJECT_STORE_BYTES
    # a trainer for each core of a large machine
    assert service["pids_limit"] >= 350 + 256 * 25
    # all but the store is on the tmpfs, where a killed container leaves nothing, and the worker sees nothing
    assert "RAY_TMPDIR=/tmp" in (ROOT / "docker/kv_store.Dockerfile").read_text()


def test_the_gpu_is_asked_for_by_the_gpu_worker_alone() -> None:
    asking = {name for name, service in SERVICES.items() if "deploy" in service}
    assert asking == {"worker-gpu"}
    (device,) = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}


def test_the_cpu_profile_is_offline_and_serves_the_bundled_model() -> None:
    for name in ("worker-cpu", "gateway-cpu"):
        assert SERVICES[name]["environment"]["HF_HUB_OFFLINE"] == "1"
        assert SERVICES[name]["environment"]["CARREL_MODEL"] == "/models/carrel-nano"
        assert "./models:/models:ro" in SERVICES[name]["volumes"]
    assert (ROOT / "models/carrel-nano/config.json").is_file()


def variables_of_compose() -> set[str]:
    """Every variable that compose.yaml takes from the shell or .env."""
    passed = {
        name
        for service in SERVICES.values()
        for name, value in service.get("environment", {}).items()
        if value is None
    }
    return passed | {found[1] for found in VARIABLE.finditer(TEXT)} | {"COMPOSE_PROFILES"}


def test_every_variable_is_in_the_example_and_the_example_has_no_other() -> None:
    described = re.findall(r"^(?:# )?([A-Z][A-Z_]+)=", EXAMPLE, re.MULTILINE)
    assert len(described) == len(set(described))
    assert set(described) == variables_of_compose()


@pytest.mark.parametrize(
    ("kind", "services"),
    [
        (GatewayConfig, ("gateway-cpu", "gateway-gpu")),
        (WorkerConfig, ("worker-cpu", "worker-gpu")),
        (StoreConfig, ("kv-store",)),
    ],
)
def test_every_option_of_a_process_can_be_set(kind: type, services: tuple[str, ...]) -> None:
    options = {each.name.replace("-", "_") for each in options_of(kind)}
    for name in services:
        reached = set(SERVICES[name]["environment"]) | {
            f"CARREL_{word[2:].replace('-', '_').upper()}"
            for word in SERVICES[name]["command"]
            if word[:2] == "--"
        }
        assert {f"CARREL_{option.upper()}" for option in options - FIXED} - reached == set()


@EACH_DOCKERFILE
def test_an_image_is_small_pinned_and_not_root(file: Path) -> None:
    text = file.read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    arguments = dict(
        rest.split("=", 1)
        for word, rest in (line for line in lines if len(line) == 2)
        if word == "ARG" and "=" in rest
    )
    bases = [rest.split()[0] for word, rest in lines if word == "FROM"]
    assert len(bases) == 2
    for base in bases:
        name = VARIABLE.sub(lambda found: arguments[found[1]], base)
        assert re.fullmatch(r"python:3\.\d+-slim@sha256:[0-9a-f]{64}", name)
        # whoever builds, and by whatever
        assert set(re.findall(r"python:3\.\d+-slim@\w+:\w+", TEXT + EXAMPLE)) == {name}
    # the last stage takes the virtual environment as it is, and ends as a user without rights
    last = lines[max(index for index, line in enumerate(lines) if line[0] == "FROM") :]
    assert ["COPY", "--from=build /venv /venv"] in last
    assert [rest for word, rest in lines if word == "USER"] == ["10001:10001"]
    assert not any("pip" in rest.split() for word, rest in last if word == "RUN")
    # what must be kept out of layers, and what would need a newer builder or a registry
    assert not re.search(r"HF_TOKEN|API_KEY", text)
    assert "--mount=" not in text
    assert "# syntax=" not in text


@pytest.mark.parametrize(
    ("name", "extra", "may_copy"),
    [
        ("gateway", "gateway", {"gateway", "gpu_worker/__init__.py", "gpu_worker/v1"}),
        ("kv_store", "kv-store", {"kv_store"}),
        (
            "gpu_worker",
            "gpu-worker",
            {"gpu_worker", "kv_store/__init__.py", "kv_store/client", "kv_store/v1"},
        ),
    ],
)
def test_an_image_holds_its_own_service_only(name: str, extra: str, may_copy: set[str]) -> None:
    text = (ROOT / f"docker/{name}.Dockerfile").read_text()
    assert re.findall(r'"\.\[(.+)\]"', text) == [f"{extra},tracing"]
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.+)", text, re.MULTILINE) for word in line.split()[:-1]
    }
    common = {"pyproject.toml", "README.md", "LICENSE", "docker/healthcheck.py"}
    assert copied - common == may_copy | {"carrel/__init__.py", "carrel/process"}
    # the build context must have it
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(f"!{path}" in ignored or f"!{path.split('/')[0]}" in ignored for path in copied)
    assert "*" in ignored
    assert not any(".env" in line or "models" in line for line in ignored if line.startswith("!"))


def probe(target: str) -> int:
    """Exit status of the containers' health check."""
    return subprocess.run(
        [sys.executable, ROOT / "docker/healthcheck.py", target], stdout=subprocess.DEVNULL, timeout=PATIENCE
    ).returncode


@pytest.fixture
def grpc_server(tmp_path: Path) -> Iterator[tuple[str, health.HealthServicer]]:
    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    target = f"unix:{tmp_path}/s"
    server.add_insecure_port(target)
    server.start()
    yield target, servicer
    server.stop(0).wait()


def test_the_health_check_asks_over_grpc(grpc_server: tuple[str, health.HealthServicer]) -> None:
    target, servicer = grpc_server
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert probe(target) == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert probe(target) == 1
    assert probe(f"{target}-that-nobody-listens-at") == 1


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (204, 1), (503, 1)])
def test_the_health_check_asks_over_http(status: int, exit_code: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert probe(f"http://127.0.0.1:{server.server_port}/ready") == exit_code
        server.shutdown()
