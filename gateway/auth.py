"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from carrel.process.options import words
from gateway.key_file import KeyEntry, KeyFile, KeyLimits

NO_LIMITS = KeyLimits()


def api_keys(text: str) -> tuple[str, ...]:
    """Keys with commas between. Raises ValueError where there is none: the API would be open."""
    if not (found := words(text)):
        raise ValueError("must hold a key: give one, or leave the option out to serve without keys")
    return found


def only(values: Sequence[str]) -> str | None:
    """A header's one value; None where it is missing or given more than once, so that no two readers differ."""
    return values[0] if len(values) == 1 else None


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key. name: for operators; by default the first digits of a hash of the key."""

    digest: bytes
    name: str
    weight: float = 1.0
    limits: KeyLimits = NO_LIMITS


class KeyRing:
    """Holds digests of the accepted keys, never the keys. Without any the API is open."""

    def __init__(self, keys: Sequence[str] = (), file: KeyFile | None = None) -> None:
        """file: of more keys, which may change."""
        digests = [_digest(key) for key in keys]
        self._own = tuple(Caller(digest, _caller(digest).hex()[:8]) for digest in digests)
        self._file = file
        self._entries: tuple[KeyEntry, ...] = ()
        self._callers: tuple[Caller, ...] = self._own
        self._by_caller = {_caller(each.digest): each for each in self._own}

    @property
    def num_keys(self) -> int:
        self._look()
        return len(self._by_caller)

    def caller(self, authorization: str | None) -> bytes | None:
        """The caller behind an `Authorization` value: 32 bytes that do not reveal its key, empty if the API is open;
        None without an accepted key. Every key is compared, in constant time."""
        callers = self._look()
        if not callers:
            return b""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known.digest) for known in callers]
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return _caller(digest)

    def weight(self, caller: bytes) -> float:
        """How much of the worker's prefill time the caller gets beside one of weight 1."""
        found = self._by_caller.get(caller)
        return 1.0 if found is None else found.weight

    def limits(self, caller: bytes) -> KeyLimits:
        found = self._by_caller.get(caller)
        return NO_LIMITS if found is None else found.limits

    def name(self, caller: bytes) -> str:
        """Return the caller's name in metrics; empty where the API is open or the key is no longer accepted."""
        found = self._by_caller.get(caller)
        return "" if found is None else found.name

    def _look(self) -> tuple[Caller, ...]:
        """All keys as they are now."""
        if self._file is not None and (entries := self._file.entries()) is not self._entries:
            self._entries = entries
            read = tuple(Caller(_digest(each.key), each.name, each.weight, each.limits) for each in entries)
            self._callers = (*self._own, *read)
            self._by_caller = {_caller(each.digest): each for each in self._callers}
        return self._callers


def _caller(digest: bytes) -> bytes:
    return hmac.digest(digest, b"carrel caller", "sha256")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
