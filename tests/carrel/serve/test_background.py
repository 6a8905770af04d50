"""Processes in the background: waited for, stopped, and their deaths reported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import PATIENCE, wait_until

from carrel.errors import ChildError
from carrel.serve.background import Background
from carrel.serve.display import Listener
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


def spec(program: str, mark: Path) -> ChildSpec:
    return ChildSpec("worker", (sys.executable, "-c", program, str(mark)), mark.exists, PATIENCE, PATIENCE)


def never(error: ChildError) -> None:
    raise AssertionError(error)


def start(program: str, mark: Path, on_death: Callable[[ChildError], None] = never) -> Background:
    return Background((spec(program, mark),), dict(os.environ), Listener(), on_death)


@pytest.mark.parametrize(
    ("program", "environment", "message", "last_words"),
    [
        ("import sys; sys.exit('no such model')", {}, "worker ended with code 1", ("no such model",)),
        (SERVES, {"LONG": "x" * (4 << 20)}, "worker cannot be started: .*too long", ()),
    ],
    ids=["ends", "cannot start"],
)
def test_one_that_does_not_come_up_is_told(
    tmp_path: Path, program: str, environment: dict[str, str], message: str, last_words: tuple[str, ...]
) -> None:
    one = spec(program, tmp_path / "mark")
    worker = Background((one,), {**os.environ, **environment}, Listener(), never)
    with pytest.raises(ChildError, match=message) as caught:
        worker.wait_ready()
    assert caught.value.lines == last_words
    worker.stop()


def test_its_death_is_told_to_one_who_may_then_clean_up(tmp_path: Path) -> None:
    told: list[ChildError] = []
    done = threading.Event()

    def on_death(error: ChildError) -> None:
        told.append(error)
        worker.stop()
        done.set()

    worker = start(SERVES, tmp_path / "mark", on_death)
    worker.wait_ready()
    os.kill(int((tmp_path / "mark").read_text()), signal.SIGKILL)
    assert done.wait(PATIENCE)
    assert "signal SIGKILL" in str(told[0])
    with pytest.raises(ChildError, match="signal SIGKILL"):
        worker.check()


def test_what_is_read_after_the_end_is_shown(tmp_path: Path) -> None:
    # its own child writes last, so that the line comes after the program has ended
    writes_last = (
        "lambda *_: (os.fork() and os._exit(0), time.sleep(0.3), print('last', flush=True), os._exit(0))"
    )
    lines: list[str] = []

    class Lines(Listener):
        def line(self, child: str, text: str) -> None:
            lines.append(text)

    program = SERVES.replace("lambda *_: sys.exit(0)", writes_last)
    worker = Background((spec(program, tmp_path / "mark"),), dict(os.environ), Lines())
    worker.wait_ready()
    worker.stop()
    assert lines == ["last"]


def test_a_death_is_found_at_once_where_something_failed(tmp_path: Path) -> None:
    worker = start(SERVES, tmp_path / "mark", lambda error: None)
    worker.wait_ready()
    process = psutil.Process(int((tmp_path / "mark").read_text()))
    process.kill()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(ChildError, match="worker ended with signal SIGKILL"):
        worker.check()
    worker.stop()
