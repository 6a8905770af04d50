"""Work that would hold up the event loop, in threads: tokenizing, chat templates, long JSON."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from carrel.process.fair_turns import FairTurns
from gateway.admission import Shares

T = TypeVar("T")

# characters, or bytes of JSON, of the largest short work: some tens of milliseconds
SHORT_SIZE = 1 << 15
# at once: fewer than asyncio's own threads, so that a turn is a thread
MAX_LONG, NUM_SHORT = 8, 2
# of what waits and runs, in all and of one key
MAX_WAITING_BYTES = 256 << 20
MAX_KEY_WAITING_BYTES = 64 << 20


class HeavyWork:
    """Runs work in threads, by fair turns of its callers. For use in one event loop.

    No thread can be interrupted, so long work has fewer threads than the machine has cores, and short work has threads
    of its own: it never waits for long work, its own caller's or another's.
    """

    def __init__(
        self,
        num_long: int | None = None,
        max_bytes: int = MAX_WAITING_BYTES,
        max_key_bytes: int = MAX_KEY_WAITING_BYTES,
        has_several_keys: Callable[[], bool] = lambda: True,
    ) -> None:
        """num_long: threads for long work; None: one fewer than cores. max_bytes, max_key_bytes: sizes that may wait
        and run at once, of all callers and of one API key of several."""
        cores = len(os.sched_getaffinity(0))
        self._long = FairTurns(max(1, min(MAX_LONG, cores - 1)) if num_long is None else num_long)
        self._short = FairTurns(NUM_SHORT)
        self._waiting = Shares(
            "bytes of text that wait to be read", max_bytes, max_key_bytes, has_several_keys
        )

    def of(self, caller: bytes) -> CallerWork:
        """The same, for one caller."""
        return CallerWork(self, caller)

    async def run(self, caller: bytes, size: int, work: Callable[..., T], *args: Any) -> T:
        """The result of `work(*args)`. size: about how many bytes or characters it reads. Raises TooManyRequests or
        Overloaded when too much waits already."""
        with self._waiting.held(caller, size):
            return await self._run(caller, size, False, work, *args)

    async def answer(self, caller: bytes, size: int, work: Callable[..., T], *args: Any) -> T:
        """As `run`, for an answer that was computed already: it is never refused, and before the caller's new work."""
        return await self._run(caller, size, True, work, *args)

    async def _run(self, caller: bytes, size: int, is_begun: bool, work: Callable[..., T], *args: Any) -> T:
        turns = self._short if size <= SHORT_SIZE else self._long
        await turns.take(caller, size, is_begun)
        running = asyncio.ensure_future(asyncio.to_thread(work, *args))
        # the turn is the thread's: it goes on when the request is cancelled
        running.add_done_callback(lambda _: turns.give_back())
        return await asyncio.shield(running)


@dataclass(frozen=True, slots=True)
class CallerWork:
    """The heavy work of one caller."""

    work: HeavyWork
    caller: bytes

    async def run(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """As `HeavyWork.run`."""
        return await self.work.run(self.caller, size, work, *args)

    async def answer(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """As `HeavyWork.answer`."""
        return await self.work.answer(self.caller, size, work, *args)
