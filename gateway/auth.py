"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence


class KeyRing:
    """Holds digests of the accepted keys, never the keys. Empty: the API is open."""

    def __init__(self, keys: Sequence[str], weights: Sequence[float] = ()) -> None:
        """weights: of the keys, in their order; of all or of none."""
        self._digests = tuple(_digest(key) for key in keys)
        callers = [_caller(digest) for digest in self._digests]
        self._weights = dict(zip(callers, weights or [1.0] * len(callers), strict=True))

    def caller(self, authorization: str | None) -> bytes | None:
        """The caller behind an `Authorization` value: 32 bytes that do not reveal its key, empty if the API is open;
        None without an accepted key. Every key is compared, in constant time."""
        if not self._digests:
            return b""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return _caller(digest)

    def weight(self, caller: bytes) -> float:
        """How much of the worker's prefill time the caller gets beside one of weight 1."""
        return self._weights.get(caller, 1.0)


def _caller(digest: bytes) -> bytes:
    return hmac.digest(digest, b"carrel caller", "sha256")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
