"""Work in threads: short work beside long, and what may wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from waiting import PATIENCE, eventually

from gateway.errors import Overloaded, TooManyRequests
from gateway.heavy_work import SHORT_SIZE, HeavyWork

LONG = SHORT_SIZE + 1


class Piece:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE)


@asynccontextmanager
async def held(work: HeavyWork, caller: bytes, size: int, count: int) -> AsyncIterator[list[Piece]]:
    """Give `work` `count` pieces of a caller, and let them end at the end of the block."""
    pieces = [Piece() for _ in range(count)]
    tasks = [asyncio.create_task(work.run(caller, size, each)) for each in pieces]
    await asyncio.sleep(0)
    try:
        yield pieces
    finally:
        for each in pieces:
            each.may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)


def num_begun(pieces: list[Piece]) -> int:
    return sum(each.has_begun.is_set() for each in pieces)


def test_short_work_never_waits_for_long_work() -> None:
    async def run() -> None:
        work = HeavyWork()
        async with held(work, b"one", LONG, 40) as pieces:
            await eventually(lambda: num_begun(pieces))
            for caller in (b"one", b"two", b""):
                assert await work.run(caller, SHORT_SIZE, lambda: 5) == 5

    asyncio.run(run())


def test_another_callers_long_work_is_next() -> None:
    async def run() -> None:
        work = HeavyWork(num_long=1)
        async with held(work, b"one", LONG, 10) as ones, held(work, b"two", LONG, 1) as twos:
            await eventually(lambda: num_begun(ones))
            next(each for each in ones if each.has_begun.is_set()).may_end.set()
            await eventually(lambda: num_begun(twos))
            assert num_begun(ones) == 1

    asyncio.run(run())


def test_a_thread_keeps_its_turn_when_its_request_is_gone() -> None:
    async def run() -> None:
        work, piece = HeavyWork(num_long=1), Piece()
        task = asyncio.create_task(work.run(b"one", LONG, piece))
        await eventually(piece.has_begun.is_set)
        task.cancel()
        await asyncio.wait([task])
        async with held(work, b"one", LONG, 3) as pieces:
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert not num_begun(pieces)
            piece.may_end.set()
            await eventually(lambda: num_begun(pieces))

    asyncio.run(run())


def test_what_fails_gives_its_turn_back() -> None:
    def fail() -> None:
        raise ValueError("broken")

    async def run() -> None:
        work = HeavyWork(num_long=1)
        for _ in range(5):
            with pytest.raises(ValueError, match="broken"):
                await work.run(b"one", LONG, fail)

    asyncio.run(run())


def test_what_waits_is_bounded_for_a_key_and_in_all() -> None:
    async def run() -> None:
        work = HeavyWork(num_long=1, max_bytes=4 * LONG, max_key_bytes=2 * LONG)
        # one may be larger than all that may wait
        assert await work.run(b"one", 10 * LONG, lambda: 5) == 5
        async with held(work, b"one", LONG, 2) as ones:
            with pytest.raises(TooManyRequests, match="bytes of text that wait to be read"):
                await work.run(b"one", LONG, lambda: 5)
            # what was computed is told
            ended = asyncio.create_task(work.of(b"one").answer(LONG, lambda: 6))
            async with held(work, b"", LONG, 2):
                with pytest.raises(Overloaded):
                    await work.run(b"two", LONG, lambda: 5)
                # those of the other caller are behind them
                for piece in ones:
                    piece.may_end.set()
        assert await ended == 6
        assert await work.run(b"one", LONG, lambda: 5) == 5

    asyncio.run(run())


def test_the_only_key_may_have_all_that_may_wait() -> None:
    async def run() -> None:
        work = HeavyWork(1, max_bytes=3 * LONG, max_key_bytes=LONG, has_several_keys=lambda: False)
        async with held(work, b"one", LONG, 3):
            with pytest.raises(Overloaded):
                await work.run(b"one", LONG, lambda: 5)

    asyncio.run(run())
