"""Bounded amounts of something, in all and of one caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.errors import Overloaded, TooManyRequests


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
                "until some end.",
                1,
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
