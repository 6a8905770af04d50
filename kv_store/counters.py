"""The store's counters since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Under the store's lock. Names are those of `StoreStats`. prefix_lookup_tokens: of prompts, in whole slabs, that
    were looked for; prefix_hit_tokens: that were found. evicted_*: given up to make room."""

    training_seconds: float = 0.0
    num_trainings: int = 0
    gathered_rows: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    evicted_bytes: int = 0
    evicted_sessions: int = 0
    expired_leases: int = 0
