"""`carrel bench`: what is started, and what is told when it cannot be."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from commands import Command
from waiting import PATIENCE

from benchmarks.commands import module_of
from carrel.commands import bench

ROOT = Path(__file__).resolve().parents[2]


def test_it_knows_the_benchmarks_that_there_are() -> None:
    files = (ROOT / "benchmarks" / "commands").glob("*.py")
    assert sorted(bench.BENCHMARKS) == sorted(
        file.stem for file in files if file.stem not in ("__init__", "options")
    )
    assert all(callable(import_module(module_of(name)).run) for name in bench.BENCHMARKS)


def test_options_reach_the_benchmark_from_any_folder(tmp_path: Path) -> None:
    # a folder of the same name is not taken for ours
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").write_text("print('theirs')")
    command = [sys.executable, "-P", "-m", "carrel", "bench", "kernels", "--device", "cpu"]
    command += ["--model-shape", "tiny", "--ops", "silu_mul", "--workloads", "64x1", "--json", "result.json"]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    assert "| silu_mul | 1 x 128 |" in ended.stdout
    assert (tmp_path / "result.json").is_file()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["fly"], 2, "invalid choice: 'fly'"),
        # the benchmark's own
        (["serve", "--url", "http://127.0.0.1:1"], 1, "no server at http://127.0.0.1:1"),
        (["serve", "--url", "http://127.0.0.1:1", "--api-key", "secret\n"], 2, "CARREL_API_KEY"),
    ],
)
def test_the_exit_code_says_what_is_wrong(argv: list[str], code: int, message: str, carrel: Command) -> None:
    error = carrel.refusal("bench", *argv, code=code)
    assert (message in error, "secret" in error) == (True, False), error


def test_without_the_folder_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrel: Command
) -> None:
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    error = carrel.refusal("bench", "decode", code=1)
    assert "there is no benchmarks/ folder" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "missing"), [("decode", "torch"), ("serve", "httpx"), ("soak", "httpx, psutil")]
)
def test_a_missing_library_is_named(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch, carrel: Command
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert f"{name} needs {missing}: pip install -e" in carrel.refusal("bench", name, code=1)
