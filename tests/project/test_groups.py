"""Tests that must not run side by side do not, in the parallel processes of `make test`."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_end_to_end_tests_are_of_one_group_and_the_clusters_of_another(
    request: pytest.FixtureRequest,
) -> None:
    """pytest-xdist has a test's group in its name."""
    items = [item for item in request.session.items if item.get_closest_marker("e2e")]
    assert [item.nodeid for item in items if not item.nodeid.endswith(("@e2e", "@cluster"))] == []
