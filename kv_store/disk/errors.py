"""Why a file of the disk tier is not used. Whoever reads it removes it, counts it and goes on."""

from __future__ import annotations

from kv_store.errors import KVStoreError


class UnusableFile(KVStoreError):
    """Base of both; the text says what is wrong with it."""


class DamagedFile(UnusableFile):
    """It is not what was written: torn, changed, or none of ours."""


class ForeignFile(UnusableFile):
    """Another layout or edition wrote it."""
