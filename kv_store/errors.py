"""Every error that the store raises on purpose; the servicer maps each branch to one gRPC status.

KVStoreError
├── ConfigError           start-up: an option that cannot be used (exit code 2)
├── VersionMismatch       the caller is of another edition
├── InvalidArgument       the caller's fault: a value out of range
├── NotFound              an unknown sequence or index
├── FailedPrecondition    a stale epoch, a lost lease, a layout that the arena does not hold
├── OutOfSpace            no room even after eviction; carries the missing bytes
├── PrefixLoading         more of a prefix will be in the arena soon: ask again
├── PinLimit              a caller has pinned as much as it may
├── Overloaded            too many index builds at once
└── TrainingFailed        a trainer died or refused
"""

from __future__ import annotations

from carrel.process.options import OptionError


class KVStoreError(Exception):
    """Base of all; the text is fit to be shown to a caller."""


class ConfigError(KVStoreError, OptionError):
    """A start-up option that cannot be used."""


class VersionMismatch(KVStoreError):
    """The caller is of another version; the text names both."""


class InvalidArgument(KVStoreError):
    """A request field that is out of range."""


class NotFound(KVStoreError):
    """The store knows no such thing, or it belongs to another worker."""


class FailedPrecondition(KVStoreError):
    """The caller's picture of the store is out of date, or the layouts differ."""


class OutOfSpace(KVStoreError):
    """No room even after eviction; `missing_bytes` says how much."""

    def __init__(self, what: str, missing_bytes: int) -> None:
        super().__init__(
            f"no room for {what}: {missing_bytes} bytes are missing; "
            "release sequences or start the store with a larger --arena-bytes"
        )
        self.missing_bytes = missing_bytes


class PrefixLoading(KVStoreError):
    """The store is loading a known prefix from the disk; repeat the call soon."""


class PinLimit(KVStoreError):
    """One caller's pinned sessions would hold more than one caller's may; the text says of what."""

    def __init__(self, excess: str) -> None:
        super().__init__(
            f"{excess}; unpin or drop another session, or start the store with a larger --arena-bytes"
        )


class Overloaded(KVStoreError):
    """Too many calls of one kind at once."""


class TrainingFailed(KVStoreError):
    """A trainer died or could not fit the index."""
