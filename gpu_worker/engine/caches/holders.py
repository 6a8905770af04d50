"""Who holds slots for recalled tokens, and gives some up when a waiting request lacks them."""

from __future__ import annotations

from gpu_worker.engine.caches.recall import RecallCache
from gpu_worker.engine.sequence import Sequence, Status
from gpu_worker.engine.slot_pool import SlotPool, num_blocks
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.policies.base import CacheShape


class Holders:
    """The admitted sequences of the recall cache, each with the layers that it serves."""

    def __init__(self, shape: CacheShape, pool: SlotPool, recall: RecallCache) -> None:
        self._shape = shape
        self._pool = pool
        self._recall = recall
        self._layers: dict[Sequence, range] = {}

    def add(self, sequence: Sequence, layers: range) -> None:
        self._layers[sequence] = layers

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; one that was never added is no error."""
        self._layers.pop(sequence, None)

    def make_room(self, num_free_blocks: int) -> bool:
        """Have so many blocks free: the largest holder gives up half of its slots, until they are.

        False where all holders' leasts leave fewer; then nobody gives up anything, as it would help no one.
        """
        spare = sum(self._spare_blocks(sequence) for sequence in self._layers)
        if self._pool.num_free_blocks + spare < num_free_blocks:
            return False
        while self._pool.num_free_blocks < num_free_blocks:
            holders = [sequence for sequence in self._layers if self._spare_blocks(sequence)]
            largest = max(holders, key=lambda sequence: sequence.num_slots)
            target = max(self._recall.least_slots(largest), largest.num_slots // 2)
            # A part of a block would free nothing.
            self._recall.shrink(largest, self._layers[largest], num_blocks(target) * BLOCK_SIZE)
        return True

    def _spare_blocks(self, sequence: Sequence) -> int:
        """Blocks that the sequence can do without, in all its layers."""
        is_prefilled = sequence.status in (Status.INDEXING, Status.DECODE)
        if not is_prefilled or not self._recall.may_shrink(sequence):
            return 0
        per_head = num_blocks(sequence.num_slots) - num_blocks(self._recall.least_slots(sequence))
        return per_head * len(self._layers[sequence]) * self._shape.num_kv_heads
