"""The recall cache: sinks and window stay in slots, selected tokens go through the hot cache, misses are fetched."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from gpu_worker.caches.base import Cache
from gpu_worker.caches.probe import Probe
from gpu_worker.caches.recall.fetch import ArenaFetch, RecallFetch, StoreFetch
from gpu_worker.caches.recall.fetch_counts import FetchCounts
from gpu_worker.caches.recall.fixed_slots import FixedSlots, fixed_positions
from gpu_worker.caches.recall.hot_cache import HotCache
from gpu_worker.caches.recall.index_training import IndexTraining, PolicyIndexes, recall_policy
from gpu_worker.caches.recall.selection import RecallParts
from gpu_worker.caches.recall.snapshots import RecallSnapshots, SeenRows
from gpu_worker.caches.recall.step import RecallStep
from gpu_worker.caches.recall.store_selection import StoreSelection
from gpu_worker.caches.snapshots import LanePlace, Snapshot
from gpu_worker.caches.whole_context import WholeContext
from gpu_worker.device import SideStream
from gpu_worker.errors import no_room_for_policy
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.policies.base import CacheShape, PromptAttention
from gpu_worker.policies.recall import IndexJob
from gpu_worker.records import HotCacheSize, IndexDevice
from gpu_worker.state.batch import Buckets, Group, GroupShape
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool, num_blocks
from gpu_worker.store.link import TrainedLayer
from gpu_worker.store.offload import Offloader

# Places of sinks and windows that are looked up at a time, over layers and heads: 2 MiB of them.
MAX_FIXED = 1 << 18


class RecallCache(Cache):
    """One cache for every recall policy and any mix of them; a policy only selects."""

    def __init__(
        self,
        shape: CacheShape,
        pool: SlotPool,
        block_tables: BlockTables,
        offloader: Offloader,
        probe: Probe,
        hot_cache_size: HotCacheSize,
        index_device: IndexDevice,
        kept: tuple[int, ...],
        num_fixed: int = 0,
    ) -> None:
        """index_device: where indexes are trained.
        kept: the arena's number of each layer.
        num_fixed: sinks, window and new token of most sequences, for which there are columns from the start.
        """
        super().__init__(shape, block_tables)
        self._kept = kept
        self._pool = pool
        self._offloader = offloader
        self._hot_cache_size = hot_cache_size
        self._whole = WholeContext(pool, block_tables)
        self.hot = HotCache(shape, pool, block_tables)
        self._fetch: RecallFetch | None = None
        self.fetch_counts = FetchCounts(shape, offloader)
        self.fixed = FixedSlots(pool, shape)
        self.fixed.make_room(num_fixed)
        self.seen = SeenRows(shape)
        self._snapshots = RecallSnapshots(self.seen, pool, block_tables)
        self.indexes = PolicyIndexes(shape, pool)
        self._in_store: StoreSelection | None = None
        if offloader.client.selects_in_store:
            self._in_store = StoreSelection(kept, pool, block_tables, offloader, self.hot)
        self._training = IndexTraining(
            shape, pool, offloader, self.indexes, self._whole, self.fixed, index_device, kept
        )
        self.probe = probe
        # Short, and attention leaves no processor free for long.
        self._beside = SideStream(shape.device, is_first=True)
        # Of tokens that are about to leave their windows: the indexes that are not loaded yet.
        self._leaving: dict[Sequence, deque[TrainedLayer]] = {}

    @property
    def state(self) -> tuple[object, ...]:
        return self.fixed.table, self._offloader.arena.view

    def needs_store(self, sequence: Sequence) -> bool:
        """Return whether an admitted sequence's rows must go to the store: to be fetched, trained from, or measured
        by."""
        is_measured = sequence.request.measure and sequence.plan.selects
        return self._keeps_in_store(sequence) or is_measured

    def _keeps_in_store(self, sequence: Sequence) -> bool:
        return sequence.can_miss or not self._training.trains_all

    def needs_store_to_decode(self, sequence: Sequence) -> bool:
        is_measured = sequence.request.measure and sequence.plan.selects
        selects_there = self._in_store is not None and sequence.plan.selects
        return (
            sequence.can_miss or is_measured or selects_there or self._training.trains_leaving_there(sequence)
        )

    def does_without_store(self, sequence: Sequence) -> bool:
        return not (self.needs_store_to_decode(sequence) or self._training.trains_prompt_there(sequence))

    def bytes_in_store(self, sequence: Sequence) -> int:
        return (
            sequence.num_tokens * self._offloader.extents.token_bytes if self._keeps_in_store(sequence) else 0
        )

    def num_blocks(self, sequence: Sequence, num_free_blocks: int) -> int:
        per_head, num_slots = self.num_layers * self._shape.num_kv_heads, 0
        while num_slots != sequence.num_slots:
            # With fewer slots than tokens it takes more pages.
            num_slots, pages = sequence.num_slots, self.missing_pages(sequence, sequence.num_backed)
            free = max(0, num_free_blocks - self._pool.blocks_of_pages(pages))
            sequence.num_slots = min(num_slots, self._num_slots(sequence, free // per_head * BLOCK_SIZE))
        return per_head * num_blocks(sequence.held_slots) + self._pool.blocks_of_pages(pages)

    def missing_pages(self, sequence: Sequence, num_tokens: int) -> int:
        seat = sequence.seat
        pages = self.block_tables.missing_pages(seat, sequence.held_slots) + self.fixed.missing_pages(seat)
        if self._in_store is None:
            pages += self.indexes.memory(recall_policy(sequence)).missing_pages(seat, num_tokens)
        if sequence.can_miss:
            pages += self.hot.memory.missing_pages(seat, num_tokens)
        return pages

    def num_held_pages(self, seat: int) -> int:
        own = self.fixed.num_held_pages(seat) + self.hot.memory.num_held_pages(seat)
        return own + self.indexes.num_held_pages(seat) + super().num_held_pages(seat)

    def _num_slots(self, sequence: Sequence, num_free_slots: int) -> int:
        """Slots for each KV head and layer when so many are free."""
        plan = sequence.plan
        if plan.all_resident:
            return sequence.capacity
        fixed = sequence.num_fixed
        wanted = fixed + self._hot_cache_size.num_slots(
            plan.num_prompt_tokens, sequence.capacity, fixed, num_free_slots
        )
        return min(sequence.capacity, max(self.least_slots(sequence), wanted))

    def least_slots(self, sequence: Sequence) -> int:
        """The least slots of each KV head and layer that a sequence needs."""
        if sequence.plan.all_resident:
            return sequence.capacity
        return min(sequence.capacity, sequence.num_fixed + (sequence.plan.num_selected or 0))

    def may_resize(self, sequence: Sequence) -> bool:
        """Return whether a prefilled sequence may get fewer or more slots: its rows are in the store, and the hot
        cache's size is not fixed."""
        return self._hot_cache_size.is_auto and sequence.offloads and sequence.plan.selects

    def prepare(self, sequence: Sequence) -> None:
        if self._in_store is None:
            self.indexes.of(recall_policy(sequence))
        self.fixed.make_room(sequence.num_fixed)

    def grows(self, sequence: Sequence) -> bool:
        return sequence.grows_resident

    def prompt_attention(self, sequence: Sequence) -> PromptAttention | None:
        return sequence.prompt_attention()

    def admit(self, sequence: Sequence) -> None:
        self.block_tables.assign(sequence.seat, sequence.held_slots)
        self.fixed.take(sequence.seat)
        self._take_index(sequence, sequence.num_backed)
        if sequence.can_miss:
            self.hot.memory.take(sequence.seat, sequence.num_backed)

    def back(self, sequence: Sequence, num_tokens: int) -> None:
        super().back(sequence, num_tokens)
        self._take_index(sequence, num_tokens)

    def _take_index(self, sequence: Sequence, num_tokens: int) -> None:
        if self._in_store is None:
            self.indexes.memory(recall_policy(sequence)).take(sequence.seat, num_tokens)

    def shrink(self, sequence: Sequence, num_slots: int) -> None:
        """Give up slots of a sequence that decodes, or soon will, down to `num_slots`, which is at least its least."""
        hot = self.hot
        if not sequence.can_miss:
            hot.memory.take(sequence.seat, sequence.num_backed)
            hot.take_over(sequence)
        hot.shrink(sequence, num_slots)
        fixed = fixed_positions(sequence, sequence.num_tokens, self._shape.device)
        for layer in range(self.num_layers):
            rows = hot.rows_of(sequence, layer, fixed)
            self.fixed.fill(sequence, range(layer, layer + 1), fixed, rows[None])
        self.block_tables.shrink(sequence.seat, num_slots)
        sequence.num_slots = num_slots

    def grow(self, sequence: Sequence, num_slots: int) -> None:
        """Take more slots for a sequence that may miss; with fewer than its capacity it still may."""
        self.block_tables.extend(sequence.seat, num_slots)
        self.hot.grow(sequence, num_slots)
        sequence.num_slots = num_slots

    def store(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        if sequence.can_miss:
            self.hot.store(sequence, layer, rows)
            fixed = fixed_positions(sequence, rows.shape[1], rows.device)
            in_pool = self.hot.rows_of(sequence, layer, fixed)
            self.fixed.fill(sequence, range(layer, layer + 1), fixed, in_pool[None])
        else:
            self._whole.store(sequence, layer, rows[None])
            if layer == 0:
                self._fix_all(sequence, rows.shape[1])
        try:
            self._training.observe(sequence, layer, rows, queries)
        except torch.OutOfMemoryError as error:
            raise no_room_for_policy(sequence.policy.name, "index", rows.shape[1]) from error

    def _fix_all(self, sequence: Sequence, num_tokens: int) -> None:
        """Start all layers of a fully resident prompt with its sinks and window: their places are known from admission
        on, and one launch for many layers takes no longer than for one."""
        fixed = fixed_positions(sequence, num_tokens, self._shape.device)
        at_once = max(1, MAX_FIXED // (self._shape.num_kv_heads * max(1, fixed.shape[0])))
        for first in range(0, self.num_layers, at_once):
            layers = range(first, min(first + at_once, self.num_layers))
            self.fixed.fill(sequence, layers, fixed, self._whole.rows_of(sequence, layers, fixed))

    def prompt_job(self, sequence: Sequence, layer: int) -> IndexJob | None:
        return self._training.job(sequence, layer)

    def load(self, sequence: Sequence, trained: TrainedLayer, timeout_seconds: float) -> bool:
        """Load a trained index if it is ready within the time. Raises StoreUnavailable when none will come, and
        CapacityError."""
        try:
            return self._training.load(sequence, trained, timeout_seconds)
        except torch.OutOfMemoryError as error:
            raise no_room_for_policy(sequence.policy.name, "index", trained.job.end) from error

    def advance(self, sequence: Sequence) -> deque[TrainedLayer] | None:
        """Move the window on for the next token. What leaves it is indexed first, while other sequences take steps.
        Raises StoreUnavailable and StoreSilent."""
        policy, begin = recall_policy(sequence), sequence.window_begin
        end = policy.window_begin(sequence.plan, sequence.num_tokens)
        sequence.leaving = -1
        if end > begin:
            job = policy.leaving_job(sequence.plan, begin, end)
            if job is None:
                sequence.leaving = begin
            else:
                if sequence not in self._leaving:
                    self._leaving[sequence] = self._training.train_leaving(sequence, job)
                left = self._leaving[sequence]
                while left and not left[0].has_failed and self._training.load(sequence, left[0], 0.0):
                    left.popleft()
                if left:
                    return left
                del self._leaving[sequence]
                self.fixed.clear_window(sequence)
        sequence.window_begin = end
        return None

    def group_shape(
        self, sequences: list[Sequence], num_lanes: int, num_tokens: int, buckets: Buckets
    ) -> GroupShape:
        """Return the shape of a group of sequences that share a policy, all of which may miss, or none.

        num_tokens: of the longest sequence, rounded up.
        """
        first = sequences[0]
        if first.plan.all_resident:
            num_positions = num_tokens
        else:
            num_positions = buckets.positions(max(sequence.window_begin for sequence in sequences))
        width = max(sequence.num_fixed for sequence in sequences)
        return GroupShape(
            first.policy.name,
            first.can_miss,
            num_lanes,
            min(num_positions, self._shape.max_model_len),
            buckets.width(max(sequence.plan.num_selected or 0 for sequence in sequences)),
            min(buckets.width(width), self.fixed.width),
        )

    def begin_step(self, group: Group) -> RecallStep:
        if self._fetch is None or self._fetch.arena is not self._offloader.arena.view:
            # The first step, or the store came back with another arena.
            self._fetch = self._make_fetch()
        parts = RecallParts(
            self._shape,
            self._pool,
            self.fixed,
            self._whole,
            self.hot,
            self._fetch,
            self._in_store,
            self.probe,
            self.seen,
            self._offloader.meter if self._shape.device.type == "cpu" else None,
            self._beside,
        )
        policy = recall_policy(group.sequences[0])
        index = self.indexes.of(policy) if self._in_store is None else None
        return RecallStep(group, policy, index, parts)

    def snapshot(self, sequence: Sequence, place: LanePlace, most: int) -> Snapshot | None:
        return self._snapshots.of(sequence, place, self.hot if sequence.can_miss else None, most)

    def _make_fetch(self) -> RecallFetch:
        arena = self._offloader.arena.view
        if self._in_store is not None:
            return self._in_store
        if arena is None:
            return StoreFetch(self._kept, self._pool, self.block_tables, self._offloader)
        return ArenaFetch(arena, self._kept, self._pool, self.block_tables, self.fetch_counts.rows)

    def count(self, sequences: list[Sequence]) -> None:
        num_layers = self.num_layers
        for sequence in sequences:
            plan, meter = sequence.plan, sequence.meter
            num_window = sequence.num_tokens - sequence.window_begin
            num_taken = min(plan.num_selected or 0, sequence.window_begin - plan.num_sink)
            attended = plan.num_sink + num_taken + (0 if plan.window_extra else num_window)
            meter.num_layer_steps += num_layers
            meter.attended_tokens += num_layers * attended
            meter.window_tokens += num_layers * num_window if plan.window_extra else 0
            meter.selected_rows += num_layers * (plan.num_selected or 0) * self._shape.num_kv_heads

    def release(self, sequence: Sequence) -> None:
        self._leaving.pop(sequence, None)
        self.indexes.free(sequence.seat)
        self.fixed.free(sequence.seat)
        self.hot.memory.free(sequence.seat)
        super().release(sequence)
