"""How tests wait: on a condition, never for a time. A limit only ends what would hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# Seconds: many times what a busy machine needs, so that only what never comes true meets it.
PATIENCE = 180.0


def wait_until(is_so: Callable[[], object], what: Callable[[], str] = lambda: "", poll: float = 0.02) -> None:
    """Return once `is_so()`; after PATIENCE seconds an AssertionError with what `what()` tells then."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, f"waited in vain {what()}"
        time.sleep(poll)


async def eventually(is_so: Callable[[], object]) -> None:
    """As `wait_until`, for a test that runs in an event loop."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)
