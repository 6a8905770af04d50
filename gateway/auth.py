"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence


class KeyRing:
    """Holds digests of the accepted keys, never the keys. Empty: everyone may pass."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def accepts(self, authorization: str | None) -> bool:
        """Whether an `Authorization` value carries a key; every key is compared, in constant time."""
        if not self._digests:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
