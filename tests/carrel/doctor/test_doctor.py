"""Test `carrel doctor` on this machine, which can start a server, and with options that no machine can serve."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command
from waiting import PATIENCE

from carrel.commands.doctor import lines
from carrel.doctor.finding import Finding, State, worst

# of the processes that it checks, and of other commands
ABSENT = ("torch", "ray", "faiss", "fastapi", "transformers", "tokenizers", "httpx", "psutil")


def findings_of(path: Path) -> dict[str, dict[str, str]]:
    return {each["subject"]: each for each in json.loads(path.read_text())["findings"]}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write options that this machine can serve."""
    path = tmp_path / "serve.yaml"
    path.write_text("port: 0\ngrpc-port: 0\ndevice: cpu\narena-bytes: 16MiB\n")
    return path


def test_a_machine_that_can_start_has_no_problem(tmp_path: Path, config: Path, carrel: Command) -> None:
    out = carrel.output("doctor", "--config", config, "--json", tmp_path / "found.json")
    found = findings_of(tmp_path / "found.json")
    assert {each["state"] for each in found.values()} <= {"ok", "warning"}
    assert {
        "python",
        "packages: store",
        "torch",
        "host memory",
        "shared memory",
        "ray",
        "weights",
    } <= found.keys()
    assert all(each["text"] in out for each in found.values())
    assert "an arena of 0.02 GiB fits" in found["host memory"]["text"]


def test_it_loads_no_package_that_may_be_missing(config: Path) -> None:
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        f"from carrel.cli import main; sys.exit(main(['doctor', '--config', {str(config)!r}]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert "packages: store" in ended.stdout


def test_a_problem_is_named_with_its_remedy_and_ends_with_1(
    tmp_path: Path, config: Path, carrel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARREL_ARENA_BYTES", "1000000GiB")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config.write_text(f"port: {port}\ngrpc-port: 0\ndevice: cuda:63\n")
        ended = carrel("doctor", "--config", config, "--json", tmp_path / "found.json")
    assert ended.code == 1
    found = findings_of(tmp_path / "found.json")
    problems = {subject for subject, each in found.items() if each["state"] == "problem"}
    assert problems == {"torch", "host memory", f"port {port}"}
    assert "choose at most --arena-bytes" in found["host memory"]["remedy"]
    assert found[f"port {port}"]["remedy"] == "choose another with --port"
    assert "'cuda:63'" in found["torch"]["text"]
    assert ended.out.splitlines()[-1].startswith("problems: 3, ")


def test_options_that_cannot_be_used_are_refused(carrel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARREL_BUDGET", "lots")
    assert "CARREL_BUDGET 'lots'" in carrel.refusal("doctor")


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], State.OK),
        ([State.OK, State.WARNING], State.WARNING),
        ([State.PROBLEM, State.WARNING, State.OK], State.PROBLEM),
    ],
)
def test_the_worst_state_decides(states: list[State], expected: State) -> None:
    assert worst(Finding(state, "a", "b") for state in states) is expected


def test_a_remedy_follows_its_finding() -> None:
    found = [Finding(State.OK, "python", "3.11.2"), Finding(State.PROBLEM, "port 1", "in use", "take 2")]
    assert lines(found) == [
        "ok       python  3.11.2",
        "problem  port 1  in use",
        "                 > take 2",
        "problems: 1, warnings: 0",
    ]
