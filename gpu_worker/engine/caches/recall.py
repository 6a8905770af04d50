"""Selected tokens through the hot cache: sinks and window stay, misses come from the arena."""

from __future__ import annotations

import time

from torch import Tensor

from gpu_worker.engine.caches.base import Cache, Group
from gpu_worker.engine.caches.hot_cache import HotCache, HotCacheSize
from gpu_worker.engine.caches.index_book import IndexBook
from gpu_worker.engine.caches.recall_step import RecallStep
from gpu_worker.engine.caches.selection import Selection, recall_policy
from gpu_worker.engine.offload import Offloader, TrainedLayer
from gpu_worker.engine.probe import Probe
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.slot_pool import BlockTables, SlotPool
from gpu_worker.errors import StoreUnavailable
from gpu_worker.policies.base import CacheShape

# Longest wait for the store to train an index; far above any real one, it only bounds a hang.
INDEX_TIMEOUT_SECONDS = 600.0
# Between two looks at whether the store is still there.
INDEX_WAIT_SECONDS = 0.5


class RecallCache(Cache):
    """One cache for every recall policy and any mix of them; a policy is asked for scores only."""

    is_indexed = True

    def __init__(
        self,
        shape: CacheShape,
        pool: SlotPool,
        block_tables: BlockTables,
        offloader: Offloader,
        hot_cache_size: HotCacheSize,
    ) -> None:
        self._shape = shape
        self._pool = pool
        self._block_tables = block_tables
        self._offloader = offloader
        self._hot_cache_size = hot_cache_size
        self._hot_cache = HotCache(shape, pool, block_tables)
        self._indexes = IndexBook(shape)
        self._probe = Probe(offloader, shape.scale)

    def num_slots(self, sequence: Sequence, num_free_slots: int) -> int:
        plan, policy = sequence.plan, recall_policy(sequence)
        if not plan.selects or policy.reads_keys:
            return sequence.capacity
        fixed = plan.num_sink + policy.max_window(plan) + 1
        needed = fixed + (plan.num_selected or 0)
        wanted = fixed + self._hot_cache_size.num_slots(
            plan.num_prompt_tokens, sequence.capacity, fixed, num_free_slots
        )
        return min(sequence.capacity, max(needed, wanted))

    def admit(self, sequence: Sequence, layer: int) -> None:
        self._block_tables.assign(sequence.seat, layer, sequence.num_slots)

    def store(self, sequence: Sequence, layer: int, rows: Tensor) -> None:
        self._hot_cache.store(sequence, layer, rows)

    def load(self, sequence: Sequence, trained: TrainedLayer, timeout_seconds: float) -> bool:
        """Take a trained index over if it is ready within the time. Raises StoreUnavailable when none will come."""
        segment = self._offloader.segment(trained, timeout_seconds)
        if segment is None:
            return False
        self._indexes.load(recall_policy(sequence), sequence.seat, trained.layer, trained.job, segment)
        return True

    def advance(self, sequence: Sequence, layers: range) -> None:
        """Move the window on for the next token; what leaves it is indexed. Raises StoreUnavailable."""
        policy, begin = recall_policy(sequence), sequence.window_begin
        end = policy.window_begin(sequence.plan, sequence.num_tokens)
        if end > begin and sequence.plan.selects:
            if policy.trains_when_leaving:
                self._train(sequence, layers, begin, end)
            else:
                keys = self._hot_cache.keys(sequence.seat, layers, begin, end)
                self._indexes.extend(policy, sequence.seat, layers, begin, keys)
        sequence.window_begin = end

    def _train(self, sequence: Sequence, layers: range, begin: int, end: int) -> None:
        job = recall_policy(sequence).index_job(sequence.plan, begin, end)
        if job is None:
            return
        self._offloader.seal(sequence, end)
        trained = [self._offloader.build(sequence, layer, job) for layer in layers]
        deadline = time.monotonic() + INDEX_TIMEOUT_SECONDS
        for index in trained:
            while not self.load(sequence, index, INDEX_WAIT_SECONDS):
                if time.monotonic() > deadline:
                    raise StoreUnavailable(f"no index within {INDEX_TIMEOUT_SECONDS:.0f} s")

    def begin_step(self, group: Group, layers: range) -> RecallStep:
        self._hot_cache.place(group.sequences, group.positions, layers)
        selection = Selection(self._shape, self._indexes, self._hot_cache, self._pool, group)
        return RecallStep(
            group,
            layers,
            selection,
            self._hot_cache,
            self._pool,
            self._offloader,
            self._probe,
            self._shape.scale,
        )

    def release(self, sequence: Sequence, layer: int) -> None:
        self._block_tables.release(sequence.seat, layer)
