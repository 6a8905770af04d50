"""The store's gauges and counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """One live sequence; `num_tokens` are sealed in every layer."""

    sequence_id: str
    worker_id: str
    num_tokens: int
    held_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The store's gauges of now and its counters since the start."""

    epoch: int
    arena_bytes: int
    held_bytes: int
    reserved_bytes: int
    leased_bytes: int
    index_bytes: int
    num_sequences: int
    num_indexes: int
    num_workers: int
    num_sessions: int
    training_seconds: float
    gathered_rows: int
    sequences: tuple[SequenceStats, ...]
