"""`carrel bench`: what is started, and what is told when it cannot be."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from waiting import PATIENCE

from benchmarks.commands import module_of
from carrel.cli import main
from carrel.commands import bench

ROOT = Path(__file__).resolve().parents[2]


def test_it_knows_the_benchmarks_that_there_are() -> None:
    files = (ROOT / "benchmarks" / "commands").glob("*.py")
    assert sorted(bench.BENCHMARKS) == sorted(
        file.stem for file in files if file.stem not in ("__init__", "options")
    )
    assert all(callable(import_module(module_of(name)).run) for name in bench.BENCHMARKS)


def test_an_unknown_benchmark_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "fly"])
    assert ended.value.code == 2


def test_options_reach_the_benchmark_from_any_folder(tmp_path: Path) -> None:
    # a folder of the same name is not taken for ours
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").write_text("print('theirs')")
    command = [
        sys.executable,
        "-P",
        "-m",
        "carrel",
        "bench",
        "kernels",
        "--device",
        "cpu",
        "--model-shape",
        "tiny",
    ]
    ended = subprocess.run(
        [*command, "--ops", "silu_mul", "--workloads", "64x1", "--json", "result.json"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    assert "| silu_mul | 1 x 128 |" in ended.stdout
    assert (tmp_path / "result.json").is_file()


def test_the_exit_code_is_the_benchmarks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server at http://127.0.0.1:1" in capfd.readouterr().err


def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--api-key", "secret\n"]) == 2
    error = capfd.readouterr().err
    assert "CARREL_API_KEY" in error
    assert "secret" not in error


def test_without_the_folder_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    assert main(["bench", "decode"]) == 1
    error = capsys.readouterr().err
    assert "there is no benchmarks/ folder" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "missing"),
    [
        (["decode"], "torch"),
        (["serve"], "httpx"),
        (["soak"], "httpx, psutil"),
    ],
)
def test_a_missing_library_is_named(
    argv: list[str], missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", *argv]) == 1
    assert f"{argv[0]} needs {missing}: pip install -e" in capsys.readouterr().err
