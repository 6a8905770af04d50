"""The `carrel` command itself: help, versions, unknown words."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from commands import Command
from waiting import PATIENCE

from carrel.commands import COMMANDS
from carrel.process.version import version
from carrel.serve.elsewhere import ELSEWHERE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, carrel: Command) -> None:
    for words in ((name, "--help"), ("--help",)):
        assert COMMANDS[name].summary in carrel.output(*words)
    assert callable(import_module(COMMANDS[name].module).run)


def test_version(carrel: Command) -> None:
    assert carrel.output("version").startswith(f"carrel {version()} (commit ")


@pytest.mark.parametrize("argv", [["eval"], ["bench", "serve"]])
@pytest.mark.parametrize(("name", "told"), [("", "is a folder"), ("book.txt/x.json", "is no folder")])
def test_where_nothing_can_be_written_is_told_before_anything_is_measured(
    argv: list[str], name: str, told: str, tmp_path: Path, carrel: Command
) -> None:
    (tmp_path / "book.txt").touch()
    error = carrel.refusal(*argv, "--json", tmp_path / name)
    assert "--json" in error
    assert str(tmp_path) in error
    assert told in error


@pytest.mark.parametrize("argv", [[], ["fly"], ["serve", "--port", "8000", "--no-such-flag"]])
def test_unknown_words_end_with_two(argv: list[str], carrel: Command) -> None:
    usage = carrel.refusal(*argv).splitlines()[0]
    assert usage.startswith("usage: carrel serve " if "serve" in argv else "usage: carrel ")


def test_an_option_that_is_misspelt_is_told_as_it_was_meant(carrel: Command) -> None:
    assert "did you mean --port?" in carrel.refusal("serve", "--prot=8000")


def test_an_option_of_another_server_is_told_what_it_is_here(carrel: Command) -> None:
    for words, told in (
        (["--tensor-parallel-size", "2", "--swap-space=4"], ["a worker has one GPU", "--arena-bytes"]),
        (["--otlp-traces-endpoint", "http://x:1"], ["--otlp-traces-endpoint: --otlp-endpoint"]),
    ):
        err = carrel.refusal("serve", "x", *words)
        assert f"error: unknown: {' '.join(words)}\n" in err
        assert all(each in err for each in told)


def test_what_is_named_in_place_of_another_option_is_there(carrel: Command) -> None:
    own = set(re.findall(r"--[a-z-]+", carrel.output("serve", "--help")))
    for name, remedy in ELSEWHERE.items():
        assert name not in own
        assert set(re.findall(r"--[a-z-]+", remedy)) <= own, name


def test_help_imports_no_heavy_library() -> None:
    script = (
        "import sys\nfrom carrel.cli import main\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'ray', 'faiss', 'transformers', 'fastapi', 'uvicorn')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert ended.stdout.splitlines()[-1] == "[]"
