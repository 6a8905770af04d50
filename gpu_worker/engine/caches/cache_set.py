"""Which cache serves which layer of which sequence, and how a batch falls into groups."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.engine.caches.base import Cache, Group, GroupStep
from gpu_worker.engine.caches.dense import DenseCache
from gpu_worker.engine.caches.recall import RecallCache
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.slot_pool import SlotPool
from gpu_worker.errors import CapacityError
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.policies.base import CacheShape, Family


class CacheSet:
    """The dense and the recall cache over one pool. The first `full_layers` layers of a recall sequence are dense."""

    def __init__(
        self, shape: CacheShape, pool: SlotPool, dense: DenseCache, recall: RecallCache, full_layers: int
    ) -> None:
        self._shape = shape
        self._pool = pool
        self._dense = dense
        self.recall = recall
        self._full_layers = min(full_layers, shape.num_layers)

    def num_dense_layers(self, sequence: Sequence) -> int:
        return self._shape.num_layers if sequence.policy.family is Family.DENSE else self._full_layers

    def of(self, sequence: Sequence) -> list[Cache]:
        """The cache of each layer."""
        num_dense = self.num_dense_layers(sequence)
        caches: list[Cache] = [self._dense] * num_dense
        return caches + [self.recall] * (self._shape.num_layers - num_dense)

    def admit(self, sequence: Sequence) -> bool:
        """Take slots in every layer; False if they must be waited for. Raises CapacityError if they never come."""
        num_dense, num_layers = self.num_dense_layers(sequence), self._shape.num_layers
        heads = self._shape.num_kv_heads
        dense_blocks = num_dense * heads * _blocks(self._dense.num_slots(sequence, 0))
        num_recall = num_layers - num_dense
        if num_recall:
            for available in (self._pool.num_free_blocks, self._pool.num_blocks):
                share = max(0, available - dense_blocks) // (num_recall * heads)
                sequence.num_slots = self.recall.num_slots(sequence, share * BLOCK_SIZE)
                needed = dense_blocks + num_recall * heads * _blocks(sequence.num_slots)
                if needed <= self._pool.num_free_blocks:
                    break
        else:
            needed = dense_blocks
        if needed > self._pool.num_blocks:
            missing = (needed - self._pool.num_blocks) * BLOCK_SIZE * self._pool.row_bytes
            raise CapacityError(
                f"the request needs {missing} bytes of slots more than the pool has; give more with "
                "--slot-memory, or ask for fewer tokens"
            )
        if needed > self._pool.num_free_blocks:
            return False
        for layer, cache in enumerate(self.of(sequence)):
            cache.admit(sequence, layer)
        return True

    def advance(self, sequence: Sequence) -> None:
        """Let the window move on for the sequence's next token in every layer."""
        num_dense = self.num_dense_layers(sequence)
        if num_dense < self._shape.num_layers:
            self.recall.advance(sequence, range(num_dense, self._shape.num_layers))

    def begin_step(
        self, sequences: list[Sequence], seats: Tensor, positions: Tensor
    ) -> list[list[GroupStep]]:
        """For each layer, the steps of the groups that the batch falls into. All sequences have advanced."""
        first, rest = range(self._full_layers), range(self._full_layers, self._shape.num_layers)
        steps: list[list[GroupStep]] = []
        for layers in (first, rest):
            if layers:
                at_layers = self._begin_step(layers, sequences, seats, positions)
                steps += [at_layers] * len(layers)
        return steps

    def _begin_step(
        self, layers: range, sequences: list[Sequence], seats: Tensor, positions: Tensor
    ) -> list[GroupStep]:
        steps: list[GroupStep] = []
        for cache in (self._dense, self.recall):
            places = [
                place
                for place, sequence in enumerate(sequences)
                if (layers.start < self.num_dense_layers(sequence)) is (cache is self._dense)
            ]
            if places:
                members = [sequences[place] for place in places]
                if len(places) < len(sequences):
                    rows = torch.tensor(places, device=positions.device)
                    group = Group(members, rows, seats[rows], positions[rows])
                else:
                    group = Group(members, None, seats, positions)
                steps.append(cache.begin_step(group, layers))
        return steps

    def release(self, sequence: Sequence) -> None:
        for layer, cache in enumerate(self.of(sequence)):
            cache.release(sequence, layer)


def _blocks(num_slots: int) -> int:
    return -(-num_slots // BLOCK_SIZE)
