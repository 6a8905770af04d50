"""The supervisor with real, tiny processes: order, readiness, death, signals, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from waiting import PATIENCE, wait_until

from carrel.errors import ChildError
from carrel.serve.display import Display
from carrel.serve.process import ChildSpec
from carrel.serve.restarts import RestartPolicy
from carrel.serve.supervisor import HARD_STOP_EXIT_CODE, Supervisor

# says that it is ready by a file, notes SIGTERM in a shared log, and ends
WELL_BEHAVED = """
import pathlib, signal, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def end(number, frame):
    with open(folder / "log", "a") as log: log.write(f"stop {name}\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
with open(folder / "log", "a") as log: log.write(f"start {name}\\n")
print('{"event": "progress", "stage": "load weights", "done": 1, "total": 2}', flush=True)
print('{"event": "ready"}', flush=True)
(folder / name).touch()
time.sleep(600)
"""
STUBBORN = WELL_BEHAVED.replace("sys.exit(0)", "pass")
# a grandchild in a session of its own, as Ray's are, that outlives its parent
WITH_GRANDCHILD = (
    """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""
    + WELL_BEHAVED
)
SLEEPS = "import time; time.sleep(600)"
FAILS = "import sys; print('error: no such model', file=sys.stderr); sys.exit({code})"


MARK = "HARNESS_FOLDER"
NO_RESTARTS = RestartPolicy(limit=0)


class Harness:
    """Builds specs of fake children in one folder and runs a supervisor over them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = StringIO()
        self.restarts = NO_RESTARTS

    def spec(
        self, name: str, script: str, stop_timeout_s: float = PATIENCE, start_timeout_s: float = PATIENCE
    ) -> ChildSpec:
        argv = (sys.executable, "-c", script, name, str(self.folder))
        return ChildSpec(name, argv, (self.folder / name).exists, start_timeout_s, stop_timeout_s)

    def specs(self, **scripts: str) -> list[ChildSpec]:
        """Store, worker and gateway. A dead one's sign of readiness goes with it, as a socket that answers does."""
        return [
            replace(
                self.spec(name, scripts.get(name, WELL_BEHAVED)),
                clean=lambda name=name: (self.folder / name).unlink(missing_ok=True),  # type: ignore[misc]
                loss=f"what the {name} held",
            )
            for name in ("store", "worker", "gateway")
        ]

    def run(
        self,
        *specs: ChildSpec,
        send: signal.Signals | None = None,
        at_ready: Callable[[], object] = lambda: None,
    ) -> int:
        def on_ready() -> None:
            self.note("ready")
            at_ready()
            if send is not None:
                os.kill(os.getpid(), send)

        display = Display(Console(file=self.output, width=200))
        environment = {**os.environ, MARK: str(self.folder)}
        supervisor = Supervisor(display, environment, self.restarts, tick_s=0.02)
        return supervisor.run(specs, on_ready)

    def left(self) -> list[psutil.Process]:
        """Every process of this folder's supervisors that runs, whatever its parent and its session."""
        return [each for each in psutil.process_iter() if self._is_ours(each)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == str(self.folder)
        except (psutil.Error, OSError):
            return False

    def note(self, text: str) -> None:
        with (self.folder / "log").open("a") as log:
            log.write(f"{text}\n")

    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()


def kill(*names: str) -> None:
    for process in [each for each in psutil.Process().children() if {*names} & {*each.cmdline()}]:
        process.kill()


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_drains_in_reverse_order_and_ends_with_zero(
    harness: Harness, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    assert harness.run(*harness.specs(), send=number) == 0
    assert signal.getsignal(number) is before
    assert harness.log() == [
        "start store",
        "start worker",
        "start gateway",
        "ready",
        "stop gateway",
        "stop worker",
        "stop store",
    ]
    assert "draining" in harness.output.getvalue()
    assert "load weights 1/2" in harness.output.getvalue()
    assert harness.left() == []


@pytest.mark.parametrize(
    ("worker", "message", "lines", "exit_code"),
    [
        # a refusal of the configuration is told in one line
        (FAILS.format(code=2), "worker ended with code 2: error: no such model", (), 2),
        (FAILS.format(code=1), "worker ended with code 1", ("error: no such model",), 1),
        (FAILS.format(code=7), "worker ended with code 7", ("error: no such model",), 1),
        (SLEEPS, "worker did not become ready in 0.3 s", (), 1),
        (WELL_BEHAVED, "worker ended with signal SIGKILL", (), 1),
    ],
    ids=["refuses", "fails", "fails oddly", "is late", "is killed while serving"],
)
def test_a_child_that_ends_by_itself_or_is_late_ends_the_others(
    harness: Harness, worker: str, message: str, lines: tuple[str, ...], exit_code: int
) -> None:
    specs = harness.specs(worker=worker)
    if worker == SLEEPS:
        specs[1] = replace(specs[1], start_timeout_s=0.3)
    with pytest.raises(ChildError) as caught:
        harness.run(*specs, at_ready=lambda: kill("worker"))
    error = caught.value
    assert (str(error), error.lines, error.exit_code) == (message, lines, exit_code)
    assert harness.output.getvalue().count("error: no such model") == ("no such model" in worker)
    log = harness.log()
    assert [line for line in log if line.startswith("stop")] == (
        ["stop gateway", "stop store"] if "ready" in log else ["stop store"]
    )
    assert harness.left() == []


def test_a_stubborn_child_is_killed_after_its_deadline(harness: Harness) -> None:
    specs = [harness.spec("store", WELL_BEHAVED), harness.spec("worker", STUBBORN, stop_timeout_s=0.3)]
    assert harness.run(*specs, send=signal.SIGTERM) == 0
    assert "worker did not end in 0.3 s and was killed" in harness.output.getvalue()
    assert harness.log()[-2:] == ["stop worker", "stop store"]
    assert harness.left() == []


@pytest.mark.parametrize("hurry_timeout_s", [0.0, PATIENCE])
def test_a_second_signal_stops_at_once_but_lets_a_gateway_end_its_streams(
    harness: Harness, hurry_timeout_s: float
) -> None:
    # signals us at its first SIGTERM, and goes on until the second, which it notes
    again = STUBBORN.replace(
        "    pass",
        "    signal.signal(signal.SIGTERM, hurry); import os; os.kill(os.getppid(), signal.SIGINT)",
    ).replace(
        "def end", "def hurry(number, frame): pathlib.Path(folder / 'hurried').touch(); sys.exit(0)\ndef end"
    )
    spec = replace(harness.spec("gateway", again, stop_timeout_s=600.0), hurry_timeout_s=hurry_timeout_s)
    assert harness.run(harness.spec("store", WELL_BEHAVED), spec, send=signal.SIGTERM) == HARD_STOP_EXIT_CODE
    assert (harness.folder / "hurried").exists() == bool(hurry_timeout_s)
    assert "stop store" not in harness.log()
    assert harness.left() == []


def test_a_signal_while_loading_stops_too(harness: Harness) -> None:
    script = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    assert harness.run(*harness.specs(worker=script)) == 0
    assert harness.log() == ["start store", "stop store"]


@pytest.fixture
def slow_handler() -> Iterator[None]:
    """Let SIGUSR1 interrupt a wait of the supervisor until after the wait's deadline."""
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.1))
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_interrupts_a_wait_does_not_prolong_it(harness: Harness, slow_handler: None) -> None:
    interrupts = "import os, signal\n" + WELL_BEHAVED.replace(
        "time.sleep(600)",
        "\nfor _ in range(5): time.sleep(0.2); os.kill(os.getppid(), signal.SIGUSR1)\n"
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(10); print('waited in vain', flush=True)",
    )
    assert harness.run(harness.spec("store", interrupts)) == 0
    assert "waited in vain" not in harness.output.getvalue()


@pytest.mark.parametrize("ending", ["drain", "death"])
def test_grandchildren_in_their_own_session_are_found_and_ended(harness: Harness, ending: str) -> None:
    spec, seen = harness.spec("store", WITH_GRANDCHILD), list[int]()

    def at_ready() -> None:
        seen.append(len(harness.left()))
        if ending == "death":
            kill("store")

    if ending == "drain":
        assert harness.run(spec, send=signal.SIGTERM, at_ready=at_ready) == 0
    else:
        with pytest.raises(ChildError):
            harness.run(spec, at_ready=at_ready)
    assert seen == [2]
    assert harness.left() == []


def test_children_die_with_a_supervisor_that_is_killed(harness: Harness) -> None:
    host = f"""
import os, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]
from pathlib import Path
from test_supervisor import Harness, STUBBORN
harness = Harness(Path({str(harness.folder)!r}))
harness.run(harness.spec("store", STUBBORN), at_ready=lambda: os.kill(os.getpid(), 9))
"""
    root = str(Path(__file__).resolve().parents[3])
    ended = subprocess.run([sys.executable, "-c", host], cwd=root, timeout=PATIENCE, check=False)
    assert ended.returncode == -signal.SIGKILL
    # the kernel sends the signal at once; the process needs a moment to be gone
    wait_until(lambda: harness.left() == [])
