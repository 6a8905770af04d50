"""Tests that must not run side by side do not, in the parallel processes of `make test`; and any of them run in one."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_no_two_files_have_one_name() -> None:
    """A folder without `__init__.py` shares the names of its modules with all others; pytest itself tells conftests
    apart."""
    names = Counter(path.name for path in TESTS.rglob("*.py"))
    assert [name for name, count in names.items() if count > 1] == ["conftest.py"]


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_end_to_end_tests_are_of_one_group(request: pytest.FixtureRequest) -> None:
    """pytest-xdist has a test's group in its name."""
    items = [item for item in request.session.items if item.get_closest_marker("e2e")]
    assert [item.nodeid for item in items if not item.nodeid.endswith("@e2e")] == []
