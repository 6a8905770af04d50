"""Rules about the shape of the tree that no linter holds."""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter

import pytest
from checkout import PACKAGES, ROOT, sources

from carrel.process.version import version

ALL = (*PACKAGES, "tools", "examples", "benchmarks")
# past 300, look for the second noun; a file that has one alone may be somewhat longer
MAX_LINES = 400
# When something was made or logged, as clients are told; and until when a session is pinned, which is a date.
TELLS = {
    "carrel/evaluation/about.py",
    "carrel/process/log_lines.py",
    "gateway/rest/app.py",
    "gateway/rest/responses/endpoints.py",
    "gateway/plan_runner.py",
    "gpu_worker/store/traces.py",
    "kv_store/sessions.py",
}
WALL = re.compile(r"\btime\.time(_ns)?\b|datetime\.(now|utcnow)\b")


def test_proto_folder_is_no_package() -> None:
    # `proto` is the import name of proto-plus, which ray's dashboard needs
    assert not list((ROOT / "proto").rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_top_level_init_is_empty(package: str) -> None:
    assert (ROOT / package / "__init__.py").read_text() == ""


def test_no_module_shadows_a_library() -> None:
    shadows = ("triton.py", "ray.py", "faiss.py", "grpc.py")
    assert [name for name, _ in sources(*ALL) if name.rpartition("/")[2] in shadows] == []


def test_no_file_is_too_long() -> None:
    lengths = {name: len(text.splitlines()) for name, text in sources(*ALL)}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_two_test_files_have_one_name() -> None:
    """A folder without `__init__.py` shares the names of its modules with all others, except for conftests."""
    names = Counter(name.rpartition("/")[2] for name, _ in sources("tests"))
    assert [name for name, count in names.items() if count > 1] == ["conftest.py"]


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_end_to_end_tests_are_of_one_group(request: pytest.FixtureRequest) -> None:
    """pytest-xdist has a test's group in its name: such tests must not run side by side."""
    items = [item for item in request.session.items if item.get_closest_marker("e2e")]
    assert [item.nodeid for item in items if not item.nodeid.endswith("@e2e")] == []


def test_deadlines_read_no_clock_that_can_be_set() -> None:
    assert {name for name, text in sources(*PACKAGES) if WALL.search(text)} == TELLS


def test_version_is_written_in_one_place() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version() == declared
    literal = re.compile(rf"""["']{re.escape(declared)}["']""")
    assert [name for name, text in sources(*ALL) if literal.search(text)] == []


def test_changelog_knows_the_version() -> None:
    assert f"## {version()}" in (ROOT / "CHANGELOG.md").read_text()
