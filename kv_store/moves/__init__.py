"""Prefixes from one store to another."""

from __future__ import annotations

from kv_store.moves.puller import PrefixPuller
from kv_store.moves.source import PrefixSource

__all__ = ["PrefixPuller", "PrefixSource"]
