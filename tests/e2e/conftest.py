from __future__ import annotations

import psutil
import pytest


@pytest.fixture(scope="session")
def orphans() -> list[psutil.Process]:
    """Ray's helpers whose head a test killed: they try for a minute to tell of its death, and end then."""
    return []
