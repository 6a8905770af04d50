"""The rest of each key's limits: requests and tokens of a minute, and bytes of the arena."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.auth import KeyRing
from gateway.errors import TooManyRequests

MINUTE = 60.0


@dataclass(slots=True)
class Bucket:
    """Fills up evenly to `limit` within a minute; `left` may fall below 0 by what was not known before."""

    limit: int
    left: float = field(init=False)
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.left, self.at = float(self.limit), -math.inf

    def fill(self, now: float) -> Bucket:
        if self.at > -math.inf:
            self.left = min(self.limit, self.left + (now - self.at) * self.limit / MINUTE)
        self.at = now
        return self

    def seconds_until(self, amount: float) -> float:
        """Until so much is there, or until it is full."""
        return max(0.0, (min(amount, self.limit) - self.left) * MINUTE / self.limit)


class RateLimits:
    """Counts in this process only. Callers without limits pass, and leave nothing behind."""

    def __init__(self, keys: KeyRing, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._buckets: dict[tuple[bytes, str], Bucket] = {}
        self._arena: Counter[bytes] = Counter()

    def take_request(self, caller: bytes) -> None:
        """One request. Raises TooManyRequests."""
        self._take(caller, "requests", 1)

    def take_prompt(self, caller: bytes, num_tokens: int) -> None:
        """The tokens of a request's prompts; of more than a minute's if nothing was taken in the last. Raises
        TooManyRequests."""
        self._take(caller, "tokens", num_tokens)

    def add_answer(self, caller: bytes, num_tokens: int) -> None:
        """Tokens that were generated: later requests have the fewer."""
        if (bucket := self._bucket(caller, "tokens")) is not None:
            bucket.left -= num_tokens

    @contextmanager
    def arena(self, caller: bytes, num_bytes: int) -> Iterator[None]:
        """Room for a request's rows while it runs. Raises TooManyRequests."""
        limit = self._keys.limits(caller).arena_bytes
        if limit is not None and self._arena[caller] + num_bytes > limit:
            raise TooManyRequests(
                f"This request may fill {num_bytes} bytes of the arena, beside {self._arena[caller]} of this key's "
                f"others, and {limit} is the most for it: wait until some end, or ask for less."
            )
        self._arena[caller] += num_bytes
        try:
            yield
        finally:
            self._arena[caller] -= num_bytes
            if not self._arena[caller]:
                del self._arena[caller]

    def headers(self, caller: bytes) -> dict[str, str]:
        """`x-ratelimit-...` as OpenAI has them, of the limits that the caller has."""
        found = {}
        for kind in ("requests", "tokens"):
            if (bucket := self._bucket(caller, kind)) is not None:
                found[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
                found[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.left)))
                found[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.limit):.3f}s"
        return found

    def _take(self, caller: bytes, kind: str, amount: int) -> None:
        bucket = self._bucket(caller, kind)
        if bucket is None:
            return
        if (wait := bucket.seconds_until(amount)) > 0:
            raise TooManyRequests(
                f"This API key may have {bucket.limit} {kind} a minute: {amount} are asked for, and "
                f"{max(0, math.floor(bucket.left))} are left.",
                retry_after_s=math.ceil(wait),
            )
        bucket.left -= amount

    def _bucket(self, caller: bytes, kind: str) -> Bucket | None:
        """As it is now."""
        limits = self._keys.limits(caller)
        limit = limits.requests_per_minute if kind == "requests" else limits.tokens_per_minute
        if limit is None:
            self._buckets.pop((caller, kind), None)
            return None
        bucket = self._buckets.get((caller, kind))
        if bucket is None or bucket.limit != limit:
            bucket = self._buckets[caller, kind] = Bucket(limit)
        return bucket.fill(self._clock())
