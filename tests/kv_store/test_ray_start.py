"""The start of the store's Ray on a machine that is too busy for Ray's own limits."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE

from carrel.process.events import ProcessEvents
from kv_store.runtimes.ray_start import Patience, StartFailed

ROOT = Path(__file__).resolve().parents[2]
# what Ray raises, as a bare Exception, when its node is late
LATE = "The current node timed out during startup. This could happen because"
# the store's process, in which Ray's first tries fail
FAILING = f"""
import sys
from kv_store.__main__ import main
from kv_store.runtimes import load_runtime

# before Ray is imported, which reads variables then
load_runtime("ray")
import ray

init, left = ray.init, int(sys.argv[1])

def fail(**options):
    global left
    if left:
        left -= 1
        raise Exception({LATE!r})
    return init(**options)

ray.init = fail
sys.exit(main(sys.argv[2:]))
"""
# the store's process with little patience for its actor
IMPATIENT = """
import sys
from kv_store.__main__ import main
from kv_store.runtimes import load_runtime

load_runtime("ray")
from kv_store.runtimes import ray_local

ray_local.START_SECONDS = 1.0
sys.exit(main(sys.argv[1:]))
"""
# makes Python programs hang at their start
HANGING = """
import time
with open("/proc/self/cmdline") as file:
    line = file.read()
if any(program in line for program in {programs!r}):
    time.sleep(3600)
"""
AGENTS = ("dashboard/agent.py", "runtime_env/agent/main.py")


@pytest.fixture
def folder() -> Iterator[Path]:
    # not tmp_path: Ray's sockets need a short path
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as name:
        yield Path(name)


def start(folder: Path, *line: str, hanging: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    if hanging:
        (folder / "site").mkdir()
        (folder / "site/sitecustomize.py").write_text(HANGING.format(programs=hanging))
        environment["PYTHONPATH"] = f"{folder}/site"
    options = (f"--listen=unix:{folder}/run/s", "--arena-bytes=262144", "--slab-bytes=4096", "--trainers=1")
    return subprocess.Popen(
        [sys.executable, *line, *options, "--runtime=ray", "--json-events"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def events_until_ready(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    """All events up to readiness; the process is told to end after it."""
    assert process.stdout is not None
    found = []
    for line in process.stdout:
        found.append(json.loads(line))
        if found[-1]["event"] == "ready":
            process.terminate()
            break
    return found


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    try:
        out, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out.splitlines(), errors.splitlines()


def test_a_ray_that_never_starts_is_tried_twice_and_ends_with_one_line(folder: Path) -> None:
    code, out, errors = finish(start(folder, "-c", FAILING, "9"))
    assert code == 2
    assert [json.loads(line)["text"] for line in out if "trying once more" in line] == [
        f"the local Ray did not start: {LATE}; trying once more"
    ]
    assert len(errors) == 1, errors
    assert LATE in errors[0]
    assert "--runtime process" in errors[0]
    assert list((folder / "run").iterdir()) == []


@pytest.mark.e2e
def test_a_ray_that_fails_once_is_started_again(folder: Path) -> None:
    process = start(folder, "-c", FAILING, "1")
    assert events_until_ready(process)[-1] == {"event": "ready"}
    assert finish(process)[0] == 0


@pytest.mark.e2e
def test_agents_of_ray_that_are_late_are_not_waited_for(folder: Path) -> None:
    process = start(folder, "-m", "kv_store", hanging=AGENTS)
    told = events_until_ready(process)
    assert told, finish(process)
    assert told[-1] == {"event": "ready"}
    assert not [each for each in told if "once more" in str(each.get("text"))]
    assert finish(process)[0] == 0


@pytest.mark.e2e
def test_an_actor_that_is_late_ends_with_one_line(folder: Path) -> None:
    code, _, errors = finish(start(folder, "-c", IMPATIENT, hanging=("workers/default_worker.py",)))
    assert code == 2
    assert "the store's actor was not ready within 1 s" in errors[-1]
    assert "--runtime process" in errors[-1]
    assert not [line for line in errors if "Traceback" in line]
    assert list((folder / "run").iterdir()) == []


def test_patience_reports_how_long_it_has_waited_and_ends() -> None:
    out = io.StringIO()
    events = ProcessEvents("kv_store", True, out)
    Patience(events, "Ray", 60.0, report_seconds=0.0).check()
    assert json.loads(out.getvalue())["text"].startswith("Ray is still starting after 0 s, of at most 60:")
    with pytest.raises(StartFailed, match="Ray was not ready within 0 s"):
        Patience(events, "Ray", 0.0).check()
