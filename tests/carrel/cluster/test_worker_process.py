"""A replica's worker: it is waited for, stopped, and its death is told."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import PATIENCE

from carrel.cluster.worker_process import WorkerProcess
from carrel.errors import ReplicaStartError
from carrel.serve.process import ChildSpec

# writes its pid when it serves, and ends with 0 on SIGTERM
SERVES = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(600)
"""
IGNORES = SERVES.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")


def spec(program: str, mark: Path, stop_s: float = PATIENCE, start_s: float = PATIENCE) -> ChildSpec:
    return ChildSpec("worker", (sys.executable, "-c", program, str(mark)), mark.exists, start_s, stop_s)


def never(reason: str) -> None:
    raise AssertionError(reason)


def start(
    program: str, mark: Path, on_death: Callable[[str], None] = never, stop_s: float = PATIENCE
) -> WorkerProcess:
    return WorkerProcess(spec(program, mark, stop_s), dict(os.environ), on_death)


@pytest.mark.parametrize(
    ("program", "stop_s"), [(SERVES, PATIENCE), (IGNORES, 0.2)], ids=["drains", "is killed"]
)
def test_it_serves_until_it_is_stopped(tmp_path: Path, program: str, stop_s: float) -> None:
    worker = start(program, tmp_path / "mark", stop_s=stop_s)
    worker.wait_ready()
    pid = int((tmp_path / "mark").read_text())
    worker.stop()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("program", "start_s", "environment", "message"),
    [
        ("import sys; sys.exit('no such model')", PATIENCE, {}, "code 1: no such model"),
        (SERVES, PATIENCE, {"LONG": "x" * (4 << 20)}, r"worker cannot be started: .*too long"),
        ("import time; time.sleep(600)", 0.1, {}, r"did not become ready in 0\.1 s"),
    ],
    ids=["ends", "cannot start", "is never ready"],
)
def test_one_that_does_not_come_up_is_told(
    tmp_path: Path, program: str, start_s: float, environment: dict[str, str], message: str
) -> None:
    late = spec(program, tmp_path / "mark", start_s=start_s)
    deaths: list[str] = []
    worker = WorkerProcess(late, {**os.environ, **environment}, deaths.append)
    with pytest.raises(ReplicaStartError, match=message):
        worker.wait_ready()
    worker.stop()
    assert not deaths or "code 1" in message


def test_its_death_is_told_to_one_who_may_then_clean_up(tmp_path: Path) -> None:
    told: list[str] = []
    done = threading.Event()

    def on_death(reason: str) -> None:
        told.append(reason)
        worker.stop()
        done.set()

    worker = start(SERVES, tmp_path / "mark", on_death)
    worker.wait_ready()
    os.kill(int((tmp_path / "mark").read_text()), signal.SIGKILL)
    assert done.wait(PATIENCE)
    assert "signal SIGKILL" in told[0]
