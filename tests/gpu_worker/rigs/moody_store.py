"""StrictStore as it is on a bad day: late, short of room, silent, and with prefixes that are lost or loading."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any, TypeVar

from strict_store import StrictStore

from kv_store.client import Begun, IndexSegment, Layout, PrefixLoading, StoreError, StoreFull, StoreSilent

Value = TypeVar("Value")


class MoodyStore(StrictStore):
    """`tick` between two steps of the engine; what is late comes some ticks later. Moods by seed, until `calm`."""

    def __init__(self, layout: Layout, capacity_tokens: int, tokens_per_slab: int, seed: int) -> None:
        super().__init__(layout, capacity_tokens, tokens_per_slab)
        self._draw = random.Random(f"moods {seed}")
        self._late: list[tuple[int, Future[Any], object]] = []
        self._silent_ticks = 0
        self._is_calm = False

    def calm(self) -> None:
        self._is_calm, self.failure = True, None

    def tick(self) -> None:
        late, self._late = self._late, []
        for left, future, value in late:
            if left:
                self._late.append((left - 1, future, value))
            elif future.set_running_or_notify_cancel():
                _settle(future, value)
        self._silent_ticks = max(0, self._silent_ticks - 1)
        if self._happens(0.01):
            self._silent_ticks = self._draw.randrange(1, 15)
        self.failure = StoreSilent("no answer") if self._silent_ticks and not self._is_calm else None

    def _happens(self, chance: float) -> bool:
        return not self._is_calm and self._draw.random() < chance

    def _later(self, value: object) -> Future[Any]:
        future: Future[Any] = Future()
        self._late.append((self._draw.choice((0, 0, 1, 2, 5, 15)), future, value))
        return future

    def begin(self, *arguments: Any, **options: Any) -> Begun:
        self._check()
        if self._happens(0.1):
            raise PrefixLoading("it comes from the disk")
        return super().begin(*arguments, **options)

    def reserve(self, sequence_id: str, num_tokens: int) -> Any:
        self._check()
        if self._happens(0.02):
            raise StoreFull("no room for slabs", missing_bytes=1)
        return super().reserve(sequence_id, num_tokens)

    def verify(self, sequence_id: str) -> Future[int]:
        """As the client's, which asks in the background: an error is the future's."""
        try:
            self._check()
        except StoreError as error:
            return self._later(error)
        if not self._happens(0.35):
            return self._later(0)
        self.prefixes.clear()
        return self._later(1 if self._happens(0.7) else StoreError("no proof"))

    def build_index(self, *arguments: Any, **options: Any) -> Future[IndexSegment]:
        built = super().build_index(*arguments, **options)
        is_short = self._happens(0.04)
        return self._later(StoreFull("no room for an index", missing_bytes=1) if is_short else built.result())


def _settle(future: Future[Any], value: object) -> None:
    match value:
        case Exception():
            future.set_exception(value)
        case _:
            future.set_result(value)
