"""Events that are taken before they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext

import pytest
from waiting import PATIENCE

from gateway.tasks import read_ahead


class Panic(BaseException):
    """As a library in Rust raises."""


@pytest.mark.parametrize(
    ("error", "raised"), [(ValueError("inner"), ValueError), (Panic("inner"), RuntimeError)]
)
async def test_what_ends_the_events_ends_the_reader(error: BaseException, raised: type[Exception]) -> None:
    async def events() -> AsyncGenerator[int, None]:
        yield 1
        raise error

    read = []

    async def read_all() -> None:
        async for event in read_ahead(events(), 8, nullcontext()):
            read.append(event)

    with pytest.raises(raised, match="inner"):
        await asyncio.wait_for(read_all(), PATIENCE)
    assert read == [1]
