"""A store that would not fit says so at its start, with what to change."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE

from kv_store.errors import ConfigError
from kv_store.local import LocalStore
from kv_store.memory import available_bytes, check_room, tightest

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SLAB = 2 * MIB


def write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


class Host:
    """Folders that look like /proc and /sys/fs/cgroup of a machine with 100 MiB free."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        kib = {"MemAvailable": 100 * 1024, "CommitLimit": 90 * 1024, "Committed_AS": 80 * 1024}
        write(
            self.proc / "meminfo",
            "\n".join(f"{name}:   {value} kB" for name, value in kib.items()) + "\nHugePages_Total: 0",
        )
        write(self.proc / "sys/vm/overcommit_memory", 0)
        self.member("0::/")

    def member(self, line: str) -> None:
        write(self.proc / "self/cgroup", line)

    def limit_v2(self, group: str, limit: object, used: int, inactive: int = 0) -> None:
        write(self.cgroups / group / "memory.max", limit)
        write(self.cgroups / group / "memory.current", used)
        write(self.cgroups / group / "memory.stat", f"anon 5\ninactive_file {inactive}")

    def check(self, num_bytes: int) -> None:
        check_room(num_bytes, SLAB, self.proc, self.cgroups)

    def available(self) -> int:
        return tightest(self.proc, self.cgroups).num_bytes


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_what_fits_is_let_in_and_one_slab_more_is_refused_with_the_size_that_fits(host: Host) -> None:
    host.check(100 * MIB)
    with pytest.raises(ConfigError) as caught:
        host.check(103 * MIB)
    text = str(caught.value)
    assert f"--arena-bytes {103 * MIB}: {3 * MIB} bytes more than this machine has free" in text
    fitting = re.search(r"at most --arena-bytes (\d+)", text)
    assert fitting
    host.check(int(fitting[1]))
    assert int(fitting[1]) == 100 * MIB


def test_the_size_that_fits_is_a_number_of_slabs(host: Host) -> None:
    host.limit_v2("", 51 * MIB, 0)
    with pytest.raises(ConfigError, match=f"at most --arena-bytes {50 * MIB},"):
        host.check(60 * MIB)
    host.limit_v2("", 1 * MIB, 0)
    with pytest.raises(ConfigError, match="not one slab fits"):
        host.check(60 * MIB)


def test_a_container_sees_its_own_limit_as_the_root(host: Host) -> None:
    host.member("0::/docker/of/the/host/only")
    host.limit_v2("", 40 * MIB, 30 * MIB, inactive=20 * MIB)
    # Pages of files are given up before memory is refused.
    assert host.available() == 30 * MIB
    with pytest.raises(ConfigError, match=r"memory limit of this container or service.*memory\.max.*raise"):
        host.check(32 * MIB)


def test_a_service_is_bound_by_the_groups_above_it_too(host: Host) -> None:
    host.member("0::/system.slice/carrel.service")
    host.limit_v2("system.slice/carrel.service", "max", 5 * MIB)
    assert host.available() == 100 * MIB
    host.limit_v2("system.slice", 64 * MIB, 4 * MIB)
    assert host.available() == 60 * MIB
    host.limit_v2("system.slice/carrel.service", 16 * MIB, 20 * MIB)
    assert host.available() == 0


def test_version_1_of_control_groups(host: Host) -> None:
    host.member("4:cpu,memory:/box\n0::/")
    write(host.cgroups / "memory/box/memory.limit_in_bytes", 32 * MIB)
    write(host.cgroups / "memory/box/memory.usage_in_bytes", 2 * MIB)
    assert host.available() == 30 * MIB


def test_a_machine_that_does_not_overcommit(host: Host) -> None:
    write(host.proc / "sys/vm/overcommit_memory", 2)
    assert host.available() == 10 * MIB
    with pytest.raises(ConfigError, match="overcommit_ratio"):
        host.check(12 * MIB)


def test_a_store_in_this_process_is_refused_too() -> None:
    too_much = (available_bytes() // SLAB + 1024) * SLAB
    with pytest.raises(ConfigError, match="--arena-bytes"):
        LocalStore(too_much)


def limit_address_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))


@pytest.mark.parametrize(
    ("arena_bytes", "limit", "remedy"),
    [(1 << 50, None, "--arena-bytes"), (4 << 30, limit_address_space, "ulimit -v")],
)
def test_the_process_ends_with_2_and_one_line(
    tmp_path: Path, arena_bytes: int, limit: object, remedy: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "kv_store",
            f"--listen=unix:{tmp_path}/s",
            f"--arena-bytes={arena_bytes}",
            "--trainers=1",
            "--runtime=process",
        ],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=limit,  # type: ignore[arg-type]
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].startswith(f"kv_store: --arena-bytes {arena_bytes}: ")
    assert remedy in found.stderr
    assert list(tmp_path.iterdir()) == []
