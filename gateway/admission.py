"""Bounded amounts of something, in all and of one caller: requests that run, bytes that wait, streams that are open."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.errors import Overloaded, ShuttingDown, TooManyRequests


class Shares:
    """Amounts that callers hold at the moment. Callers without a key count as one and may hold all, and so may the
    only key."""

    def __init__(
        self, what: str, most: int, most_of_one: int, has_several_keys: Callable[[], bool] = lambda: True
    ) -> None:
        """what: plural noun for error texts. most: of all callers together. most_of_one: of one API key of several."""
        self._what = what
        self._most = most
        self._most_of_one = most_of_one
        self._has_several_keys = has_several_keys
        self._held: Counter[bytes] = Counter()

    @contextmanager
    def held(self, caller: bytes, amount: int = 1) -> Iterator[None]:
        """Hold an amount, which may exceed a limit if nothing else is held. Raises TooManyRequests for the caller's
        limit and Overloaded for that of all."""
        self.take(caller, amount)
        try:
            yield
        finally:
            self.give_back(caller, amount)

    def take(self, caller: bytes, amount: int = 1) -> None:
        """As `held`, until `give_back`."""
        own, total = self._held[caller], self._held.total()
        is_over = own and own + amount > self._most_of_one
        if caller and is_over and self._has_several_keys():
            raise TooManyRequests(
                f"This API key has {own} {self._what} here, and {self._most_of_one} is the most for one key: wait "
                "until some end."
            )
        if total and total + amount > self._most:
            raise Overloaded(
                f"This server has {total} {self._what}, and {self._most} is the most: try again later."
            )
        self._held[caller] += amount

    def give_back(self, caller: bytes, amount: int = 1) -> None:
        """Return what `take` took."""
        self._held[caller] -= amount
        if not self._held[caller]:
            # entries of callers that are gone would pile up
            del self._held[caller]


class Admission:
    """Bounded counts of what runs: a place for each request, and one more for each choice that runs beside its first.
    Nothing waits here: the worker has the queue."""

    def __init__(
        self, max_concurrent: int, max_of: Callable[[bytes], int | None] = lambda caller: None
    ) -> None:
        """max_of: places of a caller; None: as many as of all. Callers without a key are not told apart, and not
        limited by it."""
        self._max_concurrent = max_concurrent
        self._max_of = max_of
        self._taken: Counter[bytes] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[object]] = set()
        self.num_running = 0
        self.is_draining = False
        self._is_cut = False

    @contextmanager
    def place(self, caller: bytes) -> Iterator[Place]:
        """Hold a place for a request. Raises ShuttingDown, TooManyRequests or Overloaded."""
        if self.is_draining:
            raise ShuttingDown()
        self.take(caller)
        place = Place(self, caller)
        self.num_running += 1
        self._idle.clear()
        try:
            yield place
        finally:
            self.give_back(caller, place.size)
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    def take(self, caller: bytes) -> None:
        """One place. Raises TooManyRequests or Overloaded."""
        most = self._max_of(caller) if caller else None
        if most is not None and self._taken[caller] >= most:
            raise TooManyRequests(
                f"This API key has {most} requests here, the most that it may have at once; each choice of a request "
                "that runs counts. Wait until some end, or raise the key's max-concurrent in --api-keys-file."
            )
        if self._taken.total() >= self._max_concurrent:
            raise Overloaded(f"{self._max_concurrent} requests are running, the most that this server takes.")
        self._taken[caller] += 1

    def give_back(self, caller: bytes, count: int) -> None:
        """Return this many places of a caller."""
        self._taken[caller] -= count
        if not self._taken[caller]:
            # Counts of those who are gone would pile up.
            del self._taken[caller]

    @contextmanager
    def cut_with_all(self) -> Iterator[None]:
        """A block of the current task that `cut_off` ends. Raises ShuttingDown then."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # Without `cut_off`, or when its reader has left too, this is the task's own end.
            if not self._is_cut or task.uncancel():
                raise
            raise ShuttingDown() from None
        finally:
            self._tasks.discard(task)

    async def drain(self, timeout_s: float, hurried: asyncio.Event) -> bool:
        """Admit nothing more and wait for running requests. Returns whether all of them have ended.

        timeout_s: longest wait. hurried: ends the wait when it is set.
        """
        self.is_draining = True
        waits = [asyncio.create_task(event.wait()) for event in (self._idle, hurried)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return self._idle.is_set()

    def cut_off(self) -> None:
        """End the running requests: each reader gets a ShuttingDown error behind what has been made."""
        self._is_cut = True
        for task in self._tasks:
            task.cancel()


class Place:
    """A request's hold on the server, one place large at first."""

    def __init__(self, admission: Admission, caller: bytes) -> None:
        self._admission = admission
        self._caller = caller
        self.size = 1

    def widen(self) -> bool:
        """Take a place more; False where none is free now."""
        try:
            self._admission.take(self._caller)
        except (Overloaded, TooManyRequests):
            return False
        self.size += 1
        return True

    def narrow(self) -> None:
        """Give a place back."""
        self._admission.give_back(self._caller, 1)
        self.size -= 1
