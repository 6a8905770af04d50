"""Test what `carrel serve` checks and makes before it starts anything, and the commands that it starts."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import Command
from ports import free_ports
from waiting import PATIENCE

from carrel.commands import serve
from carrel.errors import ModelNotFoundError, PortInUseError
from carrel.process.options import OptionError
from carrel.process.version import CHECKOUT
from carrel.serve.banner import Facts
from carrel.serve.children import child_environment, child_specs
from carrel.serve.endpoints import Endpoints, base_dir, held_port, reachable_host, remove_stale, runtime_dir
from carrel.serve.model import find_model
from carrel.serve.process import ChildSpec
from gateway.config import GatewayConfig
from gateway.listener import bind


def test_a_busy_port_is_refused_before_loading(carrel: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error = carrel.refusal("serve", tmp_path, "--port", port)
    assert f"127.0.0.1:{port}" in error
    assert "--port" in error
    assert "Traceback" not in error


@dataclass(frozen=True)
class Started:
    """The processes that would have been started, and the output."""

    specs: Sequence[ChildSpec]
    shown: str

    def option(self, child: str, flag: str) -> str:
        (argv,) = (spec.argv for spec in self.specs if spec.name == child)
        return argv[argv.index(flag) + 1]


@pytest.fixture
def started(carrel: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    """Call `carrel serve` with a supervisor that starts nothing."""
    all_specs = []

    def run(specs: Sequence[ChildSpec], show_banner: Callable[[], None]) -> int:
        all_specs.append(specs)
        show_banner()
        return 0

    monkeypatch.setattr(serve, "Supervisor", lambda *_: Mock(run=run))
    monkeypatch.setattr(serve, "run_checks", lambda *_: None)
    monkeypatch.setattr(serve, "gather_facts", lambda *_: Facts())

    def start(*words: object) -> Started:
        out = carrel.output("serve", *words)
        return Started(all_specs[-1], out)

    return start


def test_the_port_of_grpc_follows_that_of_http(started: Callable[..., Started]) -> None:
    def grpc_port(*words: object) -> int:
        return int(started(*words).option("gateway", "--grpc-port"))

    port = next(each for each in free_ports(20) if is_free(each + 1) and is_free(each + 2))
    assert grpc_port("--port", port) == port + 1
    # what another server took is left to it
    with socket.create_server(("127.0.0.1", port + 1)):
        beside = started("--port", port)
    chosen = int(beside.option("gateway", "--grpc-port"))
    assert chosen not in (0, port, port + 1)
    assert f"gRPC 127.0.0.1:{chosen}" in beside.shown
    assert grpc_port("--port", port, "--grpc-port", port + 2) == port + 2
    assert grpc_port("--port", port, "--grpc-port", 0) == 0
    assert grpc_port("--port", 65535) > 0


def test_a_slab_is_as_small_as_the_model_unless_its_size_is_given(started: Callable[..., Started]) -> None:
    assert started("--port", 0).option("store", "--slab-bytes") == str(256 << 10)
    assert started("--port", 0, "--slab-bytes", "1MiB").option("store", "--slab-bytes") == "1MiB"


def test_a_busy_port_of_grpc_is_named_by_its_option(carrel: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error = carrel.refusal("serve", "--port", 0, "--grpc-port", port)
    assert (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --grpc-port" in error
    )


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_ports() -> None:
    with pytest.raises(PortInUseError, match="--host"), held_port("no.such.host.invalid", 8000, "--port"):
        pass
    assert [reachable_host(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == [
        "127.0.0.1",
        "[::1]",
        "10.0.0.1",
    ]


def test_a_port_is_held_until_the_gateway_listens_on_it_and_after() -> None:
    """Else a connection that Ray makes while weights are loaded may be given it."""
    with held_port("127.0.0.1", 0, "--port") as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):
            with bind(GatewayConfig(model="m", worker="unix:w", port=port)):
                socket.create_connection(("127.0.0.1", port)).close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))


def test_models(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="carrel serve MODEL"):
        find_model(None, tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        find_model(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="no model directory"):
        find_model("/no/such/folder")
    with pytest.raises(ModelNotFoundError, match=r"GGUF file at no/such\.gguf"):
        find_model("no/such.gguf")
    bundled = tmp_path / "nano"
    with pytest.raises(ModelNotFoundError, match="make serve MODEL=smollm2"):
        find_model("smollm2", bundled)
    file = tmp_path / "smollm2.gguf"
    file.write_bytes(b"a page")
    for model in ("smollm2", str(file)):
        with pytest.raises(ModelNotFoundError, match="is no GGUF file"):
            find_model(model, bundled)
    # a head of version 3 without tensors and metadata
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert find_model("smollm2", bundled) == find_model(str(file)) == str(file)
    (tmp_path / "config.json").write_text("{}")
    assert find_model(None, tmp_path) == str(tmp_path)
    assert find_model(str(tmp_path)) == str(tmp_path)
    assert find_model("owner/name") == "owner/name"


def test_a_folder_that_is_full_or_read_only_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(OptionError, match=r"Not a directory.*XDG_RUNTIME_DIR"),
        runtime_dir(Path("/dev/null")),
    ):
        pass
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(free=1000))
    with pytest.raises(OptionError, match=r"1,000 bytes are free; make room"), runtime_dir(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_runtime_folder_is_private_and_goes(tmp_path: Path) -> None:
    with runtime_dir(tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "kv_store.sock").touch()
        # what another run finds while we live stays
        remove_stale(tmp_path)
        assert path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_its_owners_from_the_moment_it_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = fcntl.flock

    def lock_as_another_start_looks(file: int, kind: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(fcntl, "flock", lock)
            remove_stale(tmp_path)
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", lock_as_another_start_looks)
    with runtime_dir(tmp_path) as path:
        assert path.exists()


def test_a_killed_owners_folder_is_removed_by_the_next_run(tmp_path: Path) -> None:
    stale = tmp_path / "carrel-stale"
    stale.mkdir()
    (stale / "lock").touch()
    (tmp_path / "carrel-notes").mkdir()
    with runtime_dir(tmp_path):
        assert not stale.exists()
    assert (tmp_path / "carrel-notes").exists()


def test_socket_paths_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("long" * 10)))
    assert base_dir() == Path("/tmp")


def test_the_three_commands(tmp_path: Path) -> None:
    texts = {
        "api_keys": "tell-nobody",
        "arena_bytes": "256MiB",
        "shutdown_timeout_s": "3.0",
        "hang_timeout_s": "7",
    }
    specs = child_specs("some/model", texts, Endpoints(tmp_path, "127.0.0.1", 8000, 8001))
    store, worker, gateway = (" ".join(spec.argv) for spec in specs)
    assert [spec.name for spec in specs] == ["store", "worker", "gateway"]
    assert f"-m kv_store --listen unix:{tmp_path}/kv_store.sock --runtime ray" in store
    assert "-m gpu_worker some/model " in worker
    assert f" --listen unix:{tmp_path}/gpu_worker.sock" in worker
    assert f"--store unix:{tmp_path}/kv_store.sock" in worker
    assert f"-m gateway --model some/model --worker unix:{tmp_path}/gpu_worker.sock" in gateway
    assert all("--json-events" in spec.argv for spec in specs)
    assert "tell-nobody" not in store + worker + gateway
    assert [spec.environment.get("CARREL_API_KEY") for spec in specs] == [None, None, "tell-nobody"]
    assert [spec.hang_timeout_s for spec in specs] == [37.0, 7.0, 7.0]
    # a draining gateway must not be killed before its own deadline
    assert specs[2].stop_timeout_s > 3.0


def test_resolved_variables_do_not_reach_the_children_a_second_time() -> None:
    environment = child_environment(
        {
            "CARREL_PORT": "1",
            "CARREL_API_KEY": "x",
            "CARREL_CONFIG": "y",
            "HF_HOME": "/hf",
            "PYTHONPATH": "/mine",
        }
    )
    assert {key for key in environment if key.startswith("CARREL_")} == set()
    assert environment["HF_HOME"] == "/hf"
    assert environment["PYTHONPATH"] == f"{CHECKOUT}:/mine"


def test_a_folder_where_the_user_stands_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "kv_store").mkdir()
    (tmp_path / "kv_store/__main__.py").write_text("raise SystemExit(77)")
    spec = child_specs("m", {}, Endpoints(tmp_path, "127.0.0.1", 8000, 8001))[0]
    ended = subprocess.run(
        [*spec.argv, "--help"],
        cwd=tmp_path,
        env=child_environment(os.environ),
        capture_output=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0
