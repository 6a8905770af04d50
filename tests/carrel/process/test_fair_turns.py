"""In which order turns are given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from carrel.process.fair_turns import FairTurns


async def order_of(pieces: Sequence[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """In which order pieces of work have the one turn, which is taken when they come."""
    turns, served = FairTurns(1), []

    async def do(caller: bytes, size: int) -> None:
        async with turns.turn(caller, size):
            served.append((caller, size))
            await asyncio.sleep(0)

    await turns.take(b"first", 0)
    async with asyncio.TaskGroup() as group:
        for each in pieces:
            group.create_task(do(*each))
        # all of it waits
        await asyncio.sleep(0)
        turns.give_back()
    return served


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(b"a", 5)] * 4 + [(b"b", 5)] * 2, b"ababaa"),
        ([(b"a", 9)] * 3 + [(b"b", 3)] * 4, b"abbbaba"),
        ([(b"a", 5)] * 20 + [(b"b", 5), (b"c", 5)], b"abc" + b"a" * 19),
    ],
)
async def test_each_caller_has_its_turns_however_much_waits(
    pieces: list[tuple[bytes, int]], expected: bytes
) -> None:
    assert b"".join(caller for caller, _ in await order_of(pieces)) == expected


async def test_of_one_callers_work_the_smallest_is_first() -> None:
    pieces = [(b"a", size) for size in (50, 7, 90, 1)]
    assert [size for _, size in await order_of(pieces)] == [1, 7, 50, 90]


async def test_a_large_piece_is_passed_by_its_own_size_at_most() -> None:
    turns, served = FairTurns(1), list[int]()

    async def do(size: int) -> None:
        async with turns.turn(b"a", size):
            served.append(size)
            if size == 1 and len(served) < 100:
                group.create_task(do(1))
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for size in (1, 1, 20):
            group.create_task(do(size))
    assert 10 <= served.index(20) <= 21


async def test_a_caller_that_comes_again_and_again_leaves_others_their_turns() -> None:
    turns, served = FairTurns(1), list[bytes]()

    async def do(caller: bytes, times: int) -> None:
        for _ in range(times):
            async with turns.turn(caller, 5):
                served.append(caller)
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for caller, times in ((b"b", 1), (b"b", 1), (b"b", 1), (b"a", 10)):
            group.create_task(do(caller, times))
    assert served[:6].count(b"b") == 3


async def test_work_that_is_cancelled_gives_its_turn_on() -> None:
    turns = FairTurns(1)
    await turns.take(b"a", 1)
    waiting = [asyncio.create_task(turns.take(b"b", 1)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    turns.give_back()
    # it has the turn, and does not know it yet
    waiting[1].cancel()
    await asyncio.wait(waiting)
    assert [each.cancelled() for each in waiting] == [True, True, False]


async def test_what_was_begun_is_ended_before_new_work_of_its_caller() -> None:
    turns, served = FairTurns(1), list[int]()

    async def do(size: int, is_begun: bool) -> None:
        await turns.take(b"a", size, is_begun)
        served.append(size)
        turns.give_back()

    await turns.take(b"a", 1)
    async with asyncio.TaskGroup() as group:
        for size, is_begun in ((5, False), (7, False), (90, True)):
            group.create_task(do(size, is_begun))
        await asyncio.sleep(0)
        turns.give_back()
    assert served == [90, 5, 7]
