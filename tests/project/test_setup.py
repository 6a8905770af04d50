"""`make setup` installs with uv where there is one, and else with pip. Stand-ins of Python and uv note their words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT

# `python -m venv DIR` makes a folder with this program in it; any other words are noted
PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; else echo "pip: $*" >> "$NOTES"; fi
"""
UV = """#!/bin/sh
echo "uv: $*" >> "$NOTES"
exit {code}
"""
UV_WORDS = "uv: pip install --quiet --python venv/bin/python"
PIP_WORDS = "pip: -m pip install --quiet"
BY_UV = [f"{UV_WORDS} pip>=25,<27 torch==1", f"{UV_WORDS} -e .[dev]"]
BY_PIP = [f"{PIP_WORDS} --retries 1 pip>=25,<27", f"{PIP_WORDS} torch==1", f"{PIP_WORDS} -e .[dev]"]


def set_up(folder: Path, uv: str | None, python: str = PYTHON) -> int:
    """Run `make setup` in a folder, and return its exit code."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (("python", python), ("uv", uv)):
        if text is not None:
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
    # of the machine's programs only these: it may have a uv
    for name in ("cp", "mkdir", "touch"):
        (programs / name).symlink_to(shutil.which(name) or pytest.fail(name))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    environment = {"PATH": str(programs), "NOTES": str(folder / "notes")}
    words = ["VENV=venv", f"PYTHON={programs / 'python'}", "TORCH=torch==1"]
    return subprocess.run(
        [make, "setup", *words], cwd=folder, env=environment, capture_output=True
    ).returncode


@pytest.mark.parametrize(
    ("uv", "expected"),
    [
        (None, BY_PIP),
        (UV.format(code=0), BY_UV),
        # such as one that does not reach the index that pip is set to
        (UV.format(code=1), [*BY_UV[:1], *BY_PIP]),
    ],
    ids=["no uv", "uv", "a uv that fails"],
)
def test_packages_are_installed_by_uv_where_it_can(
    uv: str | None, expected: list[str], tmp_path: Path
) -> None:
    assert set_up(tmp_path, uv) == 0
    assert (tmp_path / "notes").read_text().splitlines() == expected
    assert (tmp_path / "venv" / ".ready").exists()


def test_what_pip_cannot_install_ends_make(tmp_path: Path) -> None:
    assert set_up(tmp_path, None, python=PYTHON.replace("; fi", "; exit 1; fi")) != 0
    assert not (tmp_path / "venv" / ".ready").exists()
