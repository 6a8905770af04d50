"""Errors that the client and the store raise on purpose. The store ends calls with the statuses of `rpc.ERRORS`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class StoreError(Exception):
    """Base of all; shown as a string it is fit for an operator. `text`: without the store's address."""

    def __init__(self, text: str, target: str = "") -> None:
        super().__init__(f"KV store at {target}: {text}" if target else text)
        self.text = text


class VersionMismatch(StoreError):
    """Store and client are of different versions; the text names both and the remedy."""


class TokenRefused(StoreError):
    """The store asks for a token, and this client has none or another."""


class StoreUnreachable(StoreError):
    """The store did not answer within the deadline, or its process is gone."""


class StoreSilent(StoreUnreachable):
    """The store does not answer, although its connection is there. What was asked may have been done or not: every
    short call may be repeated."""


class StaleEpoch(StoreError):
    """The client's state belongs to a store or a lease that has ended; `reattach()` starts over."""


class PrefixLoading(StoreError):
    """The store is loading a known prefix from its disk. Nothing was begun: repeat the call. After some seconds the
    call begins with what is there."""


class StoreFull(StoreError):
    """The store has no room even after eviction; the text names the missing bytes, and `missing_bytes` is 0 where it
    is not the arena that is full."""

    def __init__(self, text: str, target: str = "", missing_bytes: int = 0) -> None:
        super().__init__(text, target)
        self.missing_bytes = missing_bytes


class InvalidStoreRequest(StoreError):
    """An argument is out of range or contradicts the store's layout."""


class NotInStore(StoreError):
    """The store knows no such sequence or index."""


class CorruptRows(StoreError):
    """A checksum of the arena's bytes is not that of what was written there."""


class HandoffRefused(StoreError):
    """The arena handle failed a check: owner, header, seals, size, region or epoch."""


@contextlib.contextmanager
def refusing_odd_fields() -> Iterator[None]:
    """A field that no message can carry (negative, too large, not a string) is the caller's fault."""
    try:
        yield
    except (ValueError, TypeError) as exc:
        raise InvalidStoreRequest(f"a field that cannot be sent: {exc}") from exc
