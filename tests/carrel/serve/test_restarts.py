"""Test restarts of processes that die while all serve: when, how often, in which order, and what is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_supervisor import WELL_BEHAVED, WITH_GRANDCHILD, Harness, kill
from waiting import wait_until

from carrel.errors import ChildError
from carrel.serve.restarts import HangWatch, RestartPolicy

SOON = RestartPolicy(limit=3, first_delay_s=0.05)
# started a second time it never gets ready
READY_ONCE = WELL_BEHAVED.replace(
    "(folder / name).touch()",
    "if not (folder / 'once').exists(): (folder / name).touch()\n(folder / 'once').touch()",
)
# dies as soon as all serve
DIES_SOON = WELL_BEHAVED.replace(
    "time.sleep(600)",
    "while not (folder / 'all').exists(): time.sleep(0.02)\n"
    "print('out of luck', file=sys.stderr)\nsys.exit(7)",
)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    harness = Harness(tmp_path)
    harness.restarts = SOON
    return harness


def child(name: str) -> psutil.Process:
    return next(process for process in psutil.Process().children() if name in process.cmdline())


def meanwhile(act: Callable[[], None], end: signal.Signals | None = signal.SIGTERM) -> Callable[[], None]:
    """For `at_ready`: `act` on a thread while the supervisor watches, then a signal to us, come what may."""

    def run() -> None:
        try:
            act()
        finally:
            if end is not None:
                os.kill(os.getpid(), end)

    return threading.Thread(target=run, daemon=True).start


def starts(harness: Harness, name: str) -> int:
    return harness.log().count(f"start {name}")


@pytest.mark.parametrize("name", ["store", "worker", "gateway"])
def test_who_is_killed_is_started_again_and_the_others_stay(harness: Harness, name: str) -> None:
    def act() -> None:
        kill(name)
        wait_until(lambda: f"{name}: ready" in harness.output.getvalue().partition("SIGKILL")[2])

    assert harness.run(*harness.specs(), at_ready=meanwhile(act)) == 0
    assert [starts(harness, other) for other in ("store", "worker", "gateway")] == [
        1 + (name == other) for other in ("store", "worker", "gateway")
    ]
    # who was started last is not stopped first
    assert harness.log()[-3:] == ["stop gateway", "stop worker", "stop store"]
    line = next(text for text in harness.output.getvalue().splitlines() if "SIGKILL" in text)
    assert line == (
        f"✗ {name} ended with signal SIGKILL; lost: what the {name} held; starting it again in 0.05 s "
        "(restart 1 of at most 3 within 10 minutes)"
    )
    assert harness.left() == []


def test_the_later_wait_for_the_earlier(harness: Harness) -> None:
    def act() -> None:
        kill("gateway", "worker", "store")
        wait_until(lambda: harness.output.getvalue().count("gateway: ready") == 2)

    harness.run(*harness.specs(), at_ready=meanwhile(act))
    shown = [
        line for line in harness.output.getvalue().splitlines() if line.endswith((": ready", ": starting"))
    ]
    assert shown[-6:] == [
        "store: starting",
        "store: ready",
        "worker: starting",
        "worker: ready",
        "gateway: starting",
        "gateway: ready",
    ]


def test_who_dies_again_and_again_ends_the_whole(harness: Harness) -> None:
    with pytest.raises(ChildError) as caught:
        harness.run(*harness.specs(worker=DIES_SOON), at_ready=(harness.folder / "all").touch)
    assert str(caught.value) == (
        "worker ended with code 7, and was started again 3 within 10 minutes already"
    )
    assert caught.value.exit_code == 1
    assert caught.value.lines == ("out of luck",)
    assert starts(harness, "worker") == 4
    assert harness.log()[-2:] == ["stop gateway", "stop store"]
    assert harness.left() == []


def test_dying_in_a_restart_counts_and_shows_why(harness: Harness) -> None:
    # serves once; the second start fails before it is ready
    script = (
        "import pathlib, sys\n"
        "if (pathlib.Path(sys.argv[2]) / 'once').exists():\n"
        "    print('no room', file=sys.stderr)\n"
        "    sys.exit(2)\n"
        "(pathlib.Path(sys.argv[2]) / 'once').touch()\n"
    ) + WELL_BEHAVED
    with pytest.raises(ChildError, match="worker ended with code 2, and was") as caught:
        harness.run(*harness.specs(worker=script), at_ready=meanwhile(lambda: kill("worker"), end=None))
    assert caught.value.exit_code == 2
    assert harness.output.getvalue().count("restart 3 of at most 3") == 1
    # two restarts that failed, and the end
    assert harness.output.getvalue().count("no room") == 3


def test_a_restart_that_never_gets_ready_meets_its_deadline(harness: Harness) -> None:
    harness.restarts = RestartPolicy(limit=1, first_delay_s=0.05)
    late = replace(harness.specs(store=READY_ONCE)[0], start_timeout_s=2.0)
    with pytest.raises(ChildError, match=r"store did not become ready in 2 s, and was started again 1"):
        harness.run(late, at_ready=meanwhile(lambda: kill("store"), end=None))
    assert harness.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["pause", "start"])
def test_a_signal_during_a_restart_drains(harness: Harness, number: signal.Signals, moment: str) -> None:
    if moment == "pause":
        harness.restarts = RestartPolicy(first_delay_s=600.0)

    def act() -> None:
        kill("worker")
        wait_until(lambda: "SIGKILL" in harness.output.getvalue())
        wait_until(lambda: moment == "pause" or starts(harness, "worker") == 2)

    assert harness.run(*harness.specs(worker=READY_ONCE), at_ready=meanwhile(act, number)) == 0
    assert harness.output.getvalue().count("worker: starting") == (2 if moment == "start" else 1)
    wanted = ["stop gateway", *(["stop worker"] if moment == "start" else []), "stop store"]
    assert harness.log()[-len(wanted) :] == wanted
    assert harness.left() == []


def test_what_the_dead_one_started_is_ended_before_the_restart(harness: Harness) -> None:
    # in a session of its own and with an environment that says nothing, as Ray's actors are
    hidden = WITH_GRANDCHILD.replace("start_new_session=True", "start_new_session=True, env={}")
    seen, alive = list[psutil.Process](), list[psutil.Process]()

    def act() -> None:
        seen.extend(child("store").children())
        kill("store")
        wait_until(lambda: starts(harness, "store") == 2)
        alive.extend(process for process in seen if process.is_running())

    assert harness.run(*harness.specs(store=hidden), at_ready=meanwhile(act)) == 0
    assert (len(seen), alive) == (1, [])


def test_the_death_of_one_ends_no_process_of_another(harness: Harness) -> None:
    alive = list[bool]()

    def act() -> None:
        grandchild = child("store").children()[0]
        kill("worker")
        wait_until(lambda: starts(harness, "worker") == 2)
        alive.append(grandchild.is_running())

    before = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        harness.run(*harness.specs(store=WITH_GRANDCHILD), at_ready=meanwhile(act))
        assert before.is_running()
    finally:
        before.kill()
        before.wait()
    assert alive == [True]
    assert harness.left() == []


def test_who_hangs_is_killed_and_started_again(harness: Harness) -> None:
    store, worker, gateway = harness.specs()

    def act() -> None:
        child("worker").suspend()
        # what a stopped process does not answer
        (harness.folder / "worker").unlink()
        wait_until(lambda: harness.output.getvalue().count("worker: ready") == 2)

    watched = replace(worker, hang_timeout_s=0.5)
    assert harness.run(store, watched, gateway, at_ready=meanwhile(act)) == 0
    assert [starts(harness, name) for name in ("store", "worker", "gateway")] == [1, 2, 1]
    assert (
        "✗ worker did not answer for 0.5 s and was killed; lost: what the worker held; starting it again in"
        in (harness.output.getvalue())
    )
    assert harness.left() == []


def test_who_answers_again_in_time_or_is_not_watched_is_left_alone() -> None:
    now, answers = 0.0, True
    errors = [ValueError("what no probe expects")]

    def probe() -> bool:
        if errors:
            raise errors.pop()
        return answers

    def polled(*moments: tuple[float, bool]) -> list[bool]:
        nonlocal now, answers
        found = []
        for now, answers in moments:  # noqa: B007
            found.append(watch.has_hung())
        return found

    watch = HangWatch(probe, 10.0, lambda: now)
    unwatched = HangWatch(lambda: False, 0.0, lambda: now)
    assert not any(polled((1.0, True), (2.0, True), (5.0, False), (12.0, False), (12.5, True), (13.0, True)))
    # time in which nobody polled is not held against a process that answers
    assert polled((99.0, True), (105.0, False), (109.2, False)) == [False, False, True]
    assert not unwatched.has_hung()


def test_the_pause_doubles_up_to_a_cap_and_the_limit_counts_a_window() -> None:
    policy, deaths = RestartPolicy(limit=4, window_s=100.0, max_delay_s=5.0), deque[float]()
    granted = [policy.grant(deaths, now) for now in (0.0, 10.0, 20.0, 30.0, 40.0)]
    assert granted == [1.0, 2.0, 4.0, 5.0, None]
    # two of the four are too long ago to count
    assert policy.grant(deaths, 115.0) == 4.0
    assert list(deaths) == [20.0, 30.0, 115.0]
