"""Errors that only the store raises, beside those of `kv_store.client.errors`, which its callers see too."""

from __future__ import annotations

from carrel.process.options import OptionError
from kv_store.client.errors import StoreError, StoreFull


class ConfigError(StoreError, OptionError):
    """A start-up option that cannot be used."""


class TrainingFailed(StoreError):
    """A trainer died or could not fit the index."""


def out_of_space(what: str, missing_bytes: int) -> StoreFull:
    """Return the error for an arena without space for `what`, even after eviction."""
    return StoreFull(
        f"no room for {what}: {missing_bytes} bytes are missing; "
        "release sequences or start the store with a larger --arena-bytes",
        missing_bytes=missing_bytes,
    )
