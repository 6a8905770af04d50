"""Tasks that several callers share, and events that are taken before they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext

import pytest
from waiting import PATIENCE, eventually

from gateway.tasks import Joined, read_ahead


async def test_calls_during_a_run_share_it_and_later_ones_do_not() -> None:
    num_runs, may_end = 0, asyncio.Event()

    async def ask() -> int:
        nonlocal num_runs
        num_runs += 1
        await may_end.wait()
        return num_runs

    joined = Joined(ask)
    calls = [asyncio.create_task(joined()) for _ in range(50)]
    await eventually(lambda: num_runs)
    # the first leaves
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    may_end.set()
    assert await asyncio.gather(*calls[1:]) == [1] * 49
    assert await joined() == 2


async def test_a_failed_run_is_told_to_all_and_asked_again() -> None:
    results = [ValueError("broken"), 5]

    async def ask() -> int:
        await asyncio.sleep(0)
        result = results.pop(0)
        if isinstance(result, ValueError):
            raise result
        return result

    joined = Joined(ask)
    calls = [asyncio.create_task(joined()) for _ in range(3)]
    await asyncio.wait(calls)
    for each in calls:
        with pytest.raises(ValueError, match="broken"):
            each.result()
    assert await joined() == 5


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
