"""Shares slots among the recall sequences: they give some up for a waiting request, and get more when one leaves."""

from __future__ import annotations

from collections.abc import Collection

from gpu_worker.caches.recall.cache import RecallCache
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.policies.base import CacheShape
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool, num_blocks


class SlotSharing:
    """The admitted sequences of the recall cache."""

    def __init__(self, shape: CacheShape, pool: SlotPool, recall: RecallCache) -> None:
        self._pool = pool
        self._recall = recall
        self._num_layer_heads = recall.num_layers * shape.num_kv_heads
        # In the order of their coming.
        self._sequences: dict[Sequence, None] = {}

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; an unknown one is no error."""
        self._sequences.pop(sequence, None)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks, less those that a fully resident sequence needs to give up slots: for its residency."""
        is_any = any(not sequence.can_miss for sequence in self._sequences)
        return self._pool.num_free_blocks - is_any * self._residency_blocks

    @property
    def _residency_blocks(self) -> int:
        return self._pool.blocks_of_pages(self._recall.hot.memory.pages_for(0))

    def make_room(self, num_free_blocks: int) -> bool:
        """Free so many blocks: the largest holder gives up half of its slots, until they are free.

        False if the holders' least slots leave fewer; then none gives up anything.
        """
        if self.num_free_blocks >= num_free_blocks:
            return True
        if self.num_free_blocks + self.num_spare_blocks() < num_free_blocks:
            return False
        while self.num_free_blocks < num_free_blocks:
            holders = [sequence for sequence in self._sequences if self._spare_blocks(sequence)]
            if not holders:
                # The free blocks are no whole pages.
                return False
            largest = max(holders, key=lambda sequence: sequence.held_slots)
            target = max(self._recall.least_slots(largest), largest.held_slots // 2)
            # A part of a block would free nothing.
            self._recall.shrink(largest, num_blocks(target) * BLOCK_SIZE)
        return True

    def num_spare_blocks(self, leaving: Collection[Sequence] = ()) -> int:
        """Blocks that the remaining sequences can do without."""
        return sum(self._spare_blocks(sequence) for sequence in self._sequences if sequence not in leaving)

    def spread(self) -> None:
        """Give free slots to sequences that may miss, the smallest first: each takes half of what is free, so that the
        next request finds slots."""
        for sequence in sorted(self._sequences, key=lambda sequence: sequence.num_slots):
            if not self._may_resize(sequence) or not sequence.can_miss:
                continue
            free = max(0, self.num_free_blocks) // (2 * self._num_layer_heads)
            # A fully resident sequence has each token at its own place, from admission on only.
            target = min(sequence.capacity - 1, (num_blocks(sequence.num_slots) + free) * BLOCK_SIZE)
            if target > sequence.num_slots:
                self._recall.grow(sequence, target)

    def _may_resize(self, sequence: Sequence) -> bool:
        return sequence.is_prefilled and self._recall.may_resize(sequence)

    def _spare_blocks(self, sequence: Sequence) -> int:
        """Blocks that the sequence can do without, in all its layers."""
        if not self._may_resize(sequence):
            return 0
        per_head = num_blocks(sequence.held_slots) - num_blocks(self._recall.least_slots(sequence))
        spare = max(0, per_head) * self._num_layer_heads
        if sequence.can_miss:
            return spare
        has_pages = self._pool.has_pages(self._recall.hot.memory.pages_for(0))
        return max(0, spare - self._residency_blocks) if has_pages else 0
