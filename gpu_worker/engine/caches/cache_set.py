"""Which cache serves which layer of which sequence, and how a batch falls into groups."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpu_worker.engine.batch import Batch, Buckets, Group, GroupShape, Kind, join
from gpu_worker.engine.caches.base import Cache, GroupStep
from gpu_worker.engine.caches.dense import DenseCache
from gpu_worker.engine.caches.holders import Holders, num_blocks
from gpu_worker.engine.caches.recall import RecallCache
from gpu_worker.engine.row_inputs import RowInputs
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.slot_pool import SlotPool
from gpu_worker.errors import CapacityError
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.policies.base import CacheShape, Family


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """The steps of the groups that a batch falls into in some layers, and all their new slots, int32 [B, layers, H]."""

    layers: range
    steps: list[GroupStep]
    new_slots: Tensor


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
        self._buckets = Buckets(is_exact=shape.device.type != "cuda")
        self._holders = Holders(shape, pool, recall)

    def num_dense_layers(self, sequence: Sequence) -> int:
        """The first so many layers; all of them where the sequence attends everything."""
        is_dense = sequence.policy.family is Family.DENSE or not sequence.plan.selects
        return self._shape.num_layers if is_dense else self._full_layers

    def of(self, sequence: Sequence) -> list[Cache]:
        """The cache of each layer."""
        num_dense = self.num_dense_layers(sequence)
        caches: list[Cache] = [self._dense] * num_dense
        return caches + [self.recall] * (self._shape.num_layers - num_dense)

    @property
    def num_free_slots(self) -> int:
        """Of each layer and KV head, if all were shared evenly."""
        return self._pool.num_free_blocks // (self._shape.num_layers * self._shape.num_kv_heads) * BLOCK_SIZE

    def admit(self, sequence: Sequence) -> bool:
        """Take slots in every layer; False if they must be waited for. Raises CapacityError if they never come.

        Where slots are missing, running sequences give up what they hold beyond their least.
        """
        needed = self._size(sequence, self._pool.num_free_blocks)
        if needed > self._pool.num_free_blocks:
            most = self._size(sequence, self._pool.num_blocks)
            if most > self._pool.num_blocks:
                missing = (most - self._pool.num_blocks) * BLOCK_SIZE * self._pool.row_bytes
                raise CapacityError(
                    f"the request needs {missing} bytes of slots more than the pool has; give more with "
                    "--slot-memory, or ask for fewer tokens"
                )
            if not self._holders.make_room(needed):
                return False
            self._size(sequence, self._pool.num_free_blocks)
        num_dense = self.num_dense_layers(sequence)
        if num_dense < self._shape.num_layers:
            self.recall.prepare(sequence)
            self._holders.add(sequence, range(num_dense, self._shape.num_layers))
        for layer, cache in enumerate(self.of(sequence)):
            cache.admit(sequence, layer)
        sequence.offloads = sequence.policy.family is Family.RECALL and self.recall.needs_store(sequence)
        return True

    def _size(self, sequence: Sequence, num_free_blocks: int) -> int:
        """Choose the sequence's slots where so many blocks are free: how many blocks it takes, in all layers."""
        heads, num_dense = self._shape.num_kv_heads, self.num_dense_layers(sequence)
        num_recall = self._shape.num_layers - num_dense
        dense_blocks = num_dense * heads * num_blocks(sequence.capacity)
        sequence.num_slots = sequence.capacity
        if num_recall:
            share = max(0, num_free_blocks - dense_blocks) // (num_recall * heads)
            sequence.num_slots = self.recall.num_slots(sequence, share * BLOCK_SIZE)
        return dense_blocks + num_recall * heads * num_blocks(sequence.num_slots)

    def advance(self, sequence: Sequence) -> None:
        """Let the window move on for the sequence's next token in every layer."""
        num_dense = self.num_dense_layers(sequence)
        if num_dense < self._shape.num_layers:
            self.recall.advance(sequence, range(num_dense, self._shape.num_layers))

    def batch(self, sequences: list[Sequence]) -> Batch:
        """A decode batch of sequences that have all advanced."""
        return Batch.of(sequences, self._kind, self._group_shape, self._buckets, self._shape.max_num_seqs)

    def _kind(self, sequence: Sequence) -> Kind:
        if self.num_dense_layers(sequence) == self._shape.num_layers:
            return "", False
        return sequence.policy.name, sequence.can_miss

    def _group_shape(self, sequences: list[Sequence]) -> GroupShape:
        kind, buckets = self._kind(sequences[0]), self._buckets
        num_rows = buckets.rows(len(sequences))
        num_tokens = buckets.positions(max(sequence.num_tokens for sequence in sequences) + 1)
        if not kind[0]:
            return GroupShape(*kind, num_rows, num_tokens)
        return self.recall.group_shape(sequences, num_rows, num_tokens, buckets)

    def begin_step(self, batch: Batch, table: Tensor) -> list[LayerSteps]:
        """Start a step over the device's copy of the batch's table: its layers, in ranges that are served alike."""
        groups = batch.groups(table)
        first, rest = range(self._full_layers), range(self._full_layers, self._shape.num_layers)
        steps = []
        if first:
            everyone = Group(batch.shape.dense, 0, RowInputs.of(table), tuple(batch.sequences))
            steps.append(_layer_steps(first, [self._dense.begin_step(everyone, first)]))
        if rest:
            of_groups = [self._serving(group.shape).begin_step(group, rest) for group in groups]
            steps.append(_layer_steps(rest, of_groups))
        return steps

    def count(self, batch: Batch) -> None:
        """Add a step to the accounts of its sequences; before their new tokens count as past."""
        first, rest = range(self._full_layers), range(self._full_layers, self._shape.num_layers)
        for shape, members in zip(batch.shape.groups, batch.members, strict=True):
            self._dense.count(members, first)
            self._serving(shape).count(members, rest)

    def _serving(self, shape: GroupShape) -> Cache:
        return self.recall if shape.policy else self._dense

    def release(self, sequence: Sequence) -> None:
        self._holders.remove(sequence)
        for layer, cache in enumerate(self.of(sequence)):
            cache.release(sequence, layer)


def _layer_steps(layers: range, steps: list[GroupStep]) -> LayerSteps:
    return LayerSteps(layers, steps, join([step.new_slots for step in steps]))
