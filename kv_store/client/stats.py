"""The figures of a store, and the sessions of an owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from carrel.process.histogram import NOTHING, Distribution


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """One live sequence; `num_tokens` are sealed in every layer."""

    sequence_id: str
    worker_id: str
    num_tokens: int
    held_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class CallStats:
    """How the calls of one method went. counts: of calls by the time that they took, up to each of the store's
    `call_bounds`, then of those above all; seconds: summed; codes: how many ended how, by gRPC's names."""

    method: str
    seconds: float
    counts: tuple[int, ...]
    codes: Mapping[str, int]


@dataclass(slots=True)
class DiskStats:
    """Figures of the disk tier, since the start but for num_bytes.

    num_bytes: bytes of slabs on the disk now. num_skipped: prefixes and sessions that were not written.
    num_errors: errors of the disk. num_corrupt: files with a wrong checksum. lookup_tokens: tokens of prompts that were
    not in the arena. hit_tokens: those of them that came from the disk."""

    num_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    num_skipped: int = 0
    num_errors: int = 0
    num_corrupt: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StoreTimes:
    """In seconds, since the start. index_search: selections of one layer of a sequence. gather: copies of a call's rows
    out of the arena. For the others see `PrefixAges`."""

    index_search: Distribution = NOTHING
    gather: Distribution = NOTHING
    prefix_reuse_gap: Distribution = NOTHING
    evicted_idle: Distribution = NOTHING
    evicted_lifetime: Distribution = NOTHING


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The store's gauges of now and its counters since the start.

    leased_bytes: of slabs handed out, what live workers hold; the rest may be evicted. evicted_bytes,
    evicted_sessions: given up to make room. call_bounds: in seconds, ascending. num_pending_trainings: KV heads of
    indexes that wait for a trainer, or have one.
    """

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
    pinned_bytes: int = 0
    num_trainings: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    evicted_bytes: int = 0
    evicted_sessions: int = 0
    expired_leases: int = 0
    call_bounds: tuple[float, ...] = ()
    calls: tuple[CallStats, ...] = ()
    disk: DiskStats = field(default_factory=DiskStats)
    times: StoreTimes = StoreTimes()
    num_pending_trainings: int = 0


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session, which holds whole slabs. Times are Unix times in seconds; pinned_until 0: until it is unpinned."""

    session_id: str
    label: str
    num_tokens: int
    num_bytes: int
    created_at: float
    used_at: float
    is_pinned: bool
    pinned_until: float
