"""Test checks of ports, shared memory, folders and the address of a Ray cluster."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from carrel.doctor.finding import GIB, State
from carrel.doctor.folders import check_folder, weights_folder
from carrel.doctor.host import check_port, check_ray, check_shared_memory


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give every file system so many free bytes."""

    def fill(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * GIB, 0, free))

    return fill


def test_a_port_is_free_until_another_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = check_port("127.0.0.1", port, "--grpc-port")
    assert (taken.state, taken.remedy) == (State.PROBLEM, "choose another with --grpc-port")
    assert f"127.0.0.1:{port}" in taken.text
    assert check_port("127.0.0.1", port, "--grpc-port").state is State.OK


@pytest.mark.parametrize(("free", "state"), [(64_000_000, State.WARNING), (96_000_000, State.OK)])
def test_ray_needs_shared_memory(
    disk: Callable[[int], None], tmp_path: Path, free: int, state: State
) -> None:
    disk(free)
    assert check_shared_memory(tmp_path).state is state
    assert check_shared_memory(tmp_path / "none").state is State.WARNING


def test_a_folder_need_not_exist_but_must_take_files(disk: Callable[[int], None], tmp_path: Path) -> None:
    def check(folder: Path) -> Any:
        return check_folder("weights", folder, State.PROBLEM, "set X")

    disk(2 * GIB)
    assert check(tmp_path / "a" / "b").state is State.OK
    (tmp_path / "file").touch()
    unwritable = check(tmp_path / "file" / "b")
    assert (unwritable.state, unwritable.remedy) == (State.PROBLEM, "set X")
    disk(GIB // 2)
    full = check(tmp_path)
    assert (full.state, full.remedy) == (State.WARNING, "delete files there, or set X")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_HUB_CACHE", "/hub", "/hub"),
        ("HF_HOME", "/hf", "/hf/hub"),
        ("XDG_CACHE_HOME", "/cache", "/cache/huggingface/hub"),
        ("OTHER", "x", "/home/me/.cache/huggingface/hub"),
    ],
)
def test_weights_are_where_the_hub_has_them(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    for each in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    assert weights_folder(Path("/home/me")) == Path(expected)


def test_the_address_of_a_ray_that_has_ended_is_stale(tmp_path: Path) -> None:
    assert check_ray(tmp_path).state is State.OK
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        (tmp_path / "ray_current_cluster").write_text(address)
        assert check_ray(tmp_path).text == f"a cluster runs at {address}"
    stale = check_ray(tmp_path)
    assert stale.state is State.WARNING
    assert stale.remedy == f"rm {tmp_path}/ray_current_cluster, or start that cluster again"
    (tmp_path / "ray_current_cluster").write_text("nonsense")
    assert check_ray(tmp_path).state is State.WARNING
