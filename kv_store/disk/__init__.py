"""The disk tier: sealed slabs and sessions in files, from which a store that was restarted finds them again."""

from __future__ import annotations

from kv_store.disk.tier import DiskTier

__all__ = ["DiskTier"]
