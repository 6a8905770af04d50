"""Rules about the shape of the tree that no linter holds."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel.process.version import version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("carrel", "gateway", "gpu_worker", "kv_store")
# past 300, look for the second noun; a file that has one alone may be somewhat longer
MAX_LINES = 400


def source_files() -> Iterator[Path]:
    for top in (*PACKAGES, "tools", "examples", "benchmarks"):
        for file in sorted((ROOT / top).rglob("*.py")):
            if "_pb2" not in file.name and "__pycache__" not in file.parts:
                yield file


def test_proto_folder_is_no_package() -> None:
    # `proto` is the import name of proto-plus, which ray's dashboard needs
    assert not list((ROOT / "proto").rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_top_level_init_is_empty(package: str) -> None:
    assert (ROOT / package / "__init__.py").read_text() == ""


def test_no_module_shadows_a_library() -> None:
    shadows = {"triton.py", "ray.py", "faiss.py", "grpc.py"}
    assert [str(file) for file in source_files() if file.name in shadows] == []


def test_no_file_is_too_long() -> None:
    lengths = {file.relative_to(ROOT): len(file.read_text().splitlines()) for file in source_files()}
    assert {str(name): lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_two_test_files_have_one_name() -> None:
    """Pytest imports them as modules of no package."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_version_is_written_in_one_place() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version() == declared
    literal = re.compile(rf"""["']{re.escape(declared)}["']""")
    assert [str(file) for file in source_files() if literal.search(file.read_text())] == []


def test_changelog_knows_the_version() -> None:
    assert f"## {version()}" in (ROOT / "CHANGELOG.md").read_text()
