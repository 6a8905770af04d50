"""`python -m kv_store` as its supervisor sees it: start, events, signals, nothing left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from store_samples import LAYOUT, random_rows
from waiting import PATIENCE, wait_until

from kv_store.client import PQParams, RowsWanted, StoreClient, StoreSilent, StoreUnreachable
from kv_store.config import LEAST_ARENA_BYTES, idle_cores, parse_config

ROOT = Path(__file__).resolve().parents[2]
ARENA_BYTES = 64 * 4096


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="kvs-", dir="/tmp") as name:
        yield Path(name)


def command(folder: Path, runtime: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "kv_store",
        f"--listen=unix:{folder}/kv_store.sock",
        f"--arena-bytes={ARENA_BYTES}",
        "--slab-bytes=4096",
        "--trainers=1",
        f"--runtime={runtime}",
        "--json-events",
    ]


def start(folder: Path, runtime: str, *options: str, log: IO[str] | None = None) -> subprocess.Popen[str]:
    line = [*command(folder, runtime), *options]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "ready":
            return process
    raise AssertionError(f"the store ended with {process.wait(PATIENCE)} before it was ready")


def connect(folder: Path, call_seconds: float = PATIENCE) -> StoreClient:
    return StoreClient.connect(
        f"unix:{folder}/kv_store.sock",
        LAYOUT,
        worker_id="w",
        max_gather_rows=64,
        timeout_seconds=PATIENCE,
        call_seconds=call_seconds,
    )


def fill(client: StoreClient) -> np.ndarray:
    rows = random_rows(LAYOUT, 100)
    client.begin("a", 100)
    client.put("a", 0, 0, rows)
    client.seal("a", 100)
    return rows


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found |= {child} | descendants(child)
    return found


def listening_addresses(pids: set[int]) -> set[str]:
    """Local addresses, in the kernel's hexadecimal, of the TCP sockets on which these processes listen."""
    owned = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                owned.add(os.readlink(link))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                found.add(fields[1].split(":")[0])
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def await_end(pids: set[int], seconds: float = PATIENCE) -> set[int]:
    deadline = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def niceness(pids: set[int], actor: str) -> list[int]:
    """Return the priorities of the Ray actors of this class among the processes."""
    actors = [pid for pid in pids if f"ray::{actor}" in Path(f"/proc/{pid}/cmdline").read_text()]
    return [os.getpriority(os.PRIO_PROCESS, pid) for pid in actors]


def shared_memory(pids: set[int]) -> set[Path]:
    """Files in shared memory that the processes have mapped, also those whose names are gone."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    names = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return {Path(name.removesuffix(" (deleted)")) for name in names}


@pytest.mark.e2e
def test_ray_runs_the_store_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a machine whose memory the arena fills: by itself Ray would kill the store there
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    # Ray logs as much in a second as else in hours
    monkeypatch.setenv("RAY_event_stats_print_interval_ms", "10")
    scratch = folder / "ray"
    scratch.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(scratch))
    with (tmp_path / "log").open("w") as log:
        process = start(folder, "ray", "--log-level", "debug", log=log)
    try:
        client = connect(folder)
        rows = fill(client)
        index = client.build_index("a", 0, 0, 12, PQParams(1, 4)).result(PATIENCE)
        keys = index.arrays["codebooks"][0, 0][index.arrays["codes"][0, :, 0]]
        raw = np.ascontiguousarray(rows[0, :12, :32]).view(np.uint16).astype(np.uint32) << 16
        assert (keys == raw.view(np.float32)).all()
        assert (client.gather(0, [RowsWanted("a", 1, np.array([99]))]) == rows[1, 99]).all()
        children = descendants(process.pid)
        assert len(children) > 3
        assert [path.name[:4] for path in scratch.iterdir()] == ["ray-"]
        assert {path.name for path in folder.iterdir()} == {"arena.sock", "kv_store.sock", "ray"}
        # who asks the store waits for it, and nobody for a trainer
        [store], [trainer] = niceness(children, "StoreActor"), niceness(children, "TrainerActor")
        assert (store, trainer) == (own := os.nice(0), max(own, 15))
        wait_until(lambda: list(scratch.rglob("raylet.out.1")))
        assert max(log.stat().st_size for log in scratch.rglob("logs/*") if log.is_file()) < 1 << 20
        mapped = shared_memory(children)
        assert mapped
        assert listening_addresses(children) <= {"0100007F", "0000000000000000FFFF00000100007F"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert not await_end(children)
        assert list(folder.rglob("*")) == [scratch]
        assert not [file for file in mapped if file.exists()]
        # the actor logs where its driver does
        told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line[0] == "{"]
        assert [line["request_id"] for line in told if line["message"].startswith("BuildIndex: OK")] == ["a"]
        with pytest.raises(StoreUnreachable):
            client.stats()
        client.close()
    finally:
        process.kill()
        process.wait(PATIENCE)


def test_a_stopped_store_is_waited_for_once_and_known_to_be_silent_until_it_goes_on(folder: Path) -> None:
    process = start(folder, "process")
    try:
        client = connect(folder, call_seconds=1.0)
        rows = fill(client)
        index = client.build_index("a", 0, 0, 12, PQParams(1, 4))
        process.send_signal(signal.SIGSTOP)
        # until all of its threads stand still: one may answer meanwhile
        os.waitpid(process.pid, os.WUNTRACED)
        with pytest.raises(StoreSilent):
            client.reserve("a", 200)
        assert client.silent_seconds > 0
        assert not client.is_answering
        # What is known to be silent is not asked: this is no deadline's error.
        with pytest.raises(StoreSilent, match="does not answer"):
            client.seal("a", 100)
        # Rows need no call, and an index that is being trained waits.
        assert (client.gather(0, [RowsWanted("a", 1, np.array([99]))]) == rows[1, 99]).all()
        client.check()
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: client.is_answering and not client.silent_seconds)
        assert client.reserve("a", 200).shape[1] == 7
        assert index.result(PATIENCE).arrays["codebooks"].shape[0] == 2
        client.close()
    finally:
        process.kill()
        process.wait(PATIENCE)


def test_a_killed_store_is_unreachable_and_a_new_one_starts_anew(folder: Path) -> None:
    process = start(folder, "process")
    client = connect(folder)
    rows = fill(client)
    epoch = client.epoch
    process.kill()
    process.wait(PATIENCE)
    # What was written stays mapped, and right, as long as the lease lasts.
    assert (client.gather(0, [RowsWanted("a", 1, np.array([99]))]) == rows[1, 99]).all()
    for call in (
        lambda: client.reserve("a", 200),
        client.stats,
    ):
        with pytest.raises(StoreUnreachable):
            call()
    with pytest.raises(StoreUnreachable):
        client.build_index("a", 0, 0, 12, PQParams(1, 4)).result(PATIENCE)
    # The sockets of the killed one lie there still.
    process = start(folder, "process")
    client.reattach()
    assert client.epoch != epoch
    assert client.stats().num_sequences == 0
    client.close()
    process.terminate()
    assert process.wait(PATIENCE) == 0
    assert list(folder.iterdir()) == []


def test_the_store_ends_with_its_parent(folder: Path) -> None:
    # The parent starts the store, waits until it is ready, prints its id and ends.
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
        "any('ready' in line for line in p.stdout)\n"
        "print(p.pid, flush=True)\n"
    )
    parent = subprocess.run(
        [sys.executable, "-c", code, *command(folder, "process")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert not await_end({int(parent.stdout)})
    assert list(folder.iterdir()) == []


# the store's process; a signal comes wherever its main thread waits on a lock that it holds
SIGNALLED = """
import os, signal, sys, threading
from kv_store import __main__ as store

wait = threading.Condition.wait

def signalled(self, timeout=None):
    if sys._getframe(2).f_globals is vars(store):
        os.kill(os.getpid(), signal.SIGTERM)
    return wait(self, timeout)

threading.Condition.wait = signalled
sys.exit(store.main(sys.argv[1:]))
"""


def test_a_signal_ends_the_store_whatever_its_main_thread_holds(folder: Path) -> None:
    line = [sys.executable, "-c", SIGNALLED, *command(folder, "process")[3:]]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any(json.loads(told)["event"] == "ready" for told in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--arena-bytes=5000", "--arena-bytes"),
        ("--arena-bytes=4398046511104", "bytes more than this machine has free"),
        ("--slab-bytes=5000", "--slab-bytes"),
        ("--listen=0.0.0.0:5000", "loopback"),
        ("--listen=nowhere", "--listen"),
        ("--listen=unix:/tmp/" + "x" * 120, "107 bytes"),
    ],
)
def test_a_flag_that_cannot_be_used_ends_with_2_and_one_line(
    folder: Path, flag: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from kv_store.__main__ import main

    arguments = command(folder, "process")[3:-1]
    arguments = [value for value in arguments if value.split("=")[0] != flag.split("=")[0]]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert main([*arguments, flag]) == 2
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert named in errors[0]


def test_sizes_have_units_and_the_arena_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("LISTEN", "unix:/tmp/s"), ("SLAB_BYTES", "4KiB"), ("TRAINERS", "")):
        monkeypatch.setenv(f"CARREL_{name}", text)
    config = parse_config(["--arena-bytes", "1G", "--lease-seconds", "2.5"])
    assert (config.arena_bytes, config.slab_bytes, config.lease_seconds) == (2**30, 4096, 2.5)
    assert config.num_trainers == idle_cores()
    assert config.arena_socket == "/tmp/arena.sock"
    config = parse_config(["--slab-bytes", "1MiB"])
    assert config.arena_bytes % 2**20 == 0
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert LEAST_ARENA_BYTES <= config.arena_bytes <= max(LEAST_ARENA_BYTES, total // 4)


def test_a_second_store_leaves_a_running_ones_sockets_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kv_store.__main__ import main

    process = start(folder, "process")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert main(command(folder, "ray")[3:-1]) == 2
        assert "another store" in capsys.readouterr().err
        connect(folder).close()
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
        process.terminate()
        process.wait(PATIENCE)
