"""The store's figures, read from its parts."""

from __future__ import annotations

from dataclasses import asdict

from kv_store.calls import CALL_BOUNDS
from kv_store.client.stats import DiskStats, SequenceStats, StoreStats, StoreTimes
from kv_store.slabs import distinct
from kv_store.state import StoreState


def read_stats(state: StoreState, disk: DiskStats) -> StoreStats:
    """The caller holds the lock."""
    indexes = [index.slabs for sequence in state.sequences for index in sequence.indexes]
    index_slabs = [*indexes, *(training.segment for training in state.trainings)]
    leased = distinct(
        [
            *(sequence.table.ravel() for sequence in state.sequences),
            *(worker.response_slabs for worker in state.workers.values()),
            *(training.source for training in state.trainings),
            *index_slabs,
        ]
    )
    return StoreStats(
        epoch=state.epoch,
        arena_bytes=state.arena.handle.num_bytes,
        held_bytes=sum(sequence.held_bytes for sequence in state.sequences),
        reserved_bytes=state.allocator.num_used * state.slab_bytes,
        leased_bytes=leased * state.slab_bytes,
        index_bytes=sum(map(len, index_slabs)) * state.slab_bytes,
        num_sequences=len(state.sequences),
        num_indexes=len(indexes),
        num_workers=len(state.workers),
        num_sessions=len(state.sessions),
        sequences=tuple(
            SequenceStats(
                sequence.sequence_id,
                sequence.worker_id,
                sequence.num_tokens,
                sequence.held_bytes,
                sequence.table.size * state.slab_bytes,
            )
            for sequence in state.sequences
        ),
        pinned_bytes=state.sessions.num_pinned_slabs * state.slab_bytes,
        call_bounds=CALL_BOUNDS,
        calls=state.calls.read(),
        disk=disk,
        num_pending_trainings=sum(len(sequence.trainings) for sequence in state.sequences),
        times=StoreTimes(
            state.search_seconds.read(),
            state.gather_seconds.read(),
            state.prefixes.ages.reuse_gap.read(),
            state.prefixes.ages.evicted_idle.read(),
            state.prefixes.ages.evicted_lifetime.read(),
        ),
        **asdict(state.counters),
    )
