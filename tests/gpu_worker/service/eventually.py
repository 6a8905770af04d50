"""Waiting in tests."""

from __future__ import annotations

import asyncio
import time


async def eventually(condition, seconds: float = 10.0) -> None:
    """Wait until `condition()`; fails the test when that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)
