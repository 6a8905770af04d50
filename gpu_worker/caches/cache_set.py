"""Chooses the cache of each layer of each sequence, and divides a batch into groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from gpu_worker.caches.base import Cache, GroupStep
from gpu_worker.caches.dense import DenseCache
from gpu_worker.caches.recall.cache import RecallCache
from gpu_worker.caches.retain.cache import RetainCache
from gpu_worker.caches.sight import LanePlace, Sight
from gpu_worker.caches.slot_sharing import SlotSharing
from gpu_worker.errors import NeverFits
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.policies.base import CacheShape, Family
from gpu_worker.state.batch import Batch, Buckets, Group, GroupShape, Kind, join
from gpu_worker.state.lane_inputs import LaneInputs
from gpu_worker.state.resident_prefixes import ResidentPrefixes
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import BlockTables, SlotPool, num_blocks
from gpu_worker.store.trainings import TrainedLayer


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """The steps of a batch's groups in some layers, and all their new slots, int32 [B, layers, H]."""

    layers: range
    steps: list[GroupStep]
    new_slots: Tensor


class CacheSet:
    """The caches over one pool. The first `full_layers` layers are dense for all sequences."""

    def __init__(
        self,
        shape: CacheShape,
        pool: SlotPool,
        block_tables: BlockTables,
        dense: DenseCache,
        retain: RetainCache,
        recall: RecallCache,
        full_layers: int,
        residents: ResidentPrefixes,
    ) -> None:
        self._shape = shape
        self._pool = pool
        self.block_tables = block_tables
        self._dense = dense
        self._sparse: dict[Family, Cache] = {Family.RETAIN: retain, Family.RECALL: recall}
        self.retain = retain
        self.recall = recall
        self._full_layers = min(full_layers, shape.num_layers)
        self.buckets = Buckets(is_exact=shape.device.type != "cuda")
        self._sharing = SlotSharing(shape, pool, recall)
        self.residents = residents

    @property
    def state(self) -> tuple[object, ...]:
        """Objects whose addresses captured steps hold: with other objects the steps are void."""
        return (*self.recall.state, *self.retain.state)

    def of(self, sequence: Sequence) -> list[Cache]:
        """The cache of each layer."""
        sparse = self._sparse_layers(sequence)
        return [self._dense] * sparse.start + [self._serving(sequence)] * len(sparse)

    def _sparse_layers(self, sequence: Sequence) -> range:
        """The layers that do not attend everything; none if the whole sequence does."""
        attends_all = sequence.policy.family is Family.DENSE or not sequence.plan.selects
        num_layers = self._shape.num_layers
        return range(num_layers if attends_all else self._full_layers, num_layers)

    def _serving(self, sequence: Sequence) -> Cache:
        """The cache of the layers behind those that are dense for all sequences."""
        return self._sparse[sequence.policy.family] if self._sparse_layers(sequence) else self._dense

    @property
    def num_free_slots(self) -> int:
        """Free slots of each layer and KV head, if all were shared evenly."""
        return self._pool.num_free_blocks // (self._shape.num_layers * self._shape.num_kv_heads) * BLOCK_SIZE

    def fits_without(self, sequence: Sequence, leaving: Collection[Sequence]) -> bool:
        """Whether a waiting sequence would find slots if these gave up all of theirs."""
        free = self._pool.num_free_blocks + self._sharing.num_spare_blocks(leaving)
        free += sum(self.block_tables.num_held(other.seat) for other in leaving)
        return self._size(sequence, 0) <= free

    def admit(self, sequence: Sequence) -> bool:
        """Take slots in every layer; False if the sequence must wait. Raises NeverFits if it never fits.

        Where slots are missing, running sequences give up what they hold beyond their least.
        """
        alone = self._blocks(sequence, sequence.sure_tokens, self._pool.num_blocks)
        if alone > self._pool.num_blocks:
            missing = (alone - self._pool.num_blocks) * self._pool.block_bytes
            raise NeverFits(
                f"the request needs {missing} bytes of slots more than the pool has; give more with "
                "--slot-memory, or ask for fewer tokens"
            )
        needed = self._size(sequence, self._pool.num_free_blocks)
        if needed > self._pool.num_free_blocks:
            if not self._sharing.make_room(needed):
                return False
            self._size(sequence, self._pool.num_free_blocks)
        serving, sparse = self._serving(sequence), self._sparse_layers(sequence)
        serving.prepare(sequence)
        if serving is self.recall:
            self._sharing.add(sequence, sparse)
        self._dense.admit(sequence, range(sparse.start))
        if sparse:
            serving.admit(sequence, sparse)
        sequence.offloads = self._offloading(sequence).needs_store(sequence)
        return True

    def _offloading(self, sequence: Sequence) -> Cache:
        """The cache that decides what goes to the store, also where every layer is dense because the budget covers
        the prompt."""
        return self._sparse.get(sequence.policy.family, self._dense)

    def needs_store_to_decode(self, sequence: Sequence) -> bool:
        """See `Cache.needs_store_to_decode`."""
        return self._offloading(sequence).needs_store_to_decode(sequence)

    def does_without_store(self, sequence: Sequence) -> bool:
        """See `Cache.does_without_store`."""
        return self._offloading(sequence).does_without_store(sequence)

    def held_bytes(self, sequence: Sequence) -> tuple[int, int]:
        """Bytes that the sequence holds: of its slots in all layers, and of its rows in the store."""
        in_store = self._offloading(sequence).bytes_in_store(sequence) if sequence.offloads else 0
        return self.block_tables.held_bytes(sequence.seat), in_store

    def _size(self, sequence: Sequence, num_free_blocks: int) -> int:
        """Choose the sequence's slots when so many blocks are free; returns the blocks it takes, in all layers."""
        return self._blocks(sequence, sequence.soon_tokens, num_free_blocks)

    def _blocks(self, sequence: Sequence, num_grown_slots: int, num_free_blocks: int) -> int:
        """The same, with so many slots where it takes them as it grows."""
        sparse = self._sparse_layers(sequence)
        sequence.num_slots, sequence.num_grown_slots = sequence.capacity, num_grown_slots
        needed = self._dense.num_blocks(sequence, sparse.start, num_free_blocks)
        if sparse:
            needed += self._serving(sequence).num_blocks(sequence, len(sparse), num_free_blocks - needed)
        return needed

    def advance(self, sequence: Sequence) -> deque[TrainedLayer] | None:
        """Let the window move on for the sequence's next token in every layer; see `Cache.advance`."""
        return self._serving(sequence).advance(sequence, self._sparse_layers(sequence))

    def grow(self, sequence: Sequence) -> bool:
        """Take slots for its next token where it takes them as it grows; before any sequence of the step advances, as
        others may give up slots for it. False where there are none."""
        if self._misses_slots(sequence) and not self.finds_slots(sequence):
            return False
        # Unless it gave up slots itself, and may miss tokens from now on.
        if self._misses_slots(sequence):
            self._extend(sequence)
        return True

    def finds_slots(self, sequence: Sequence) -> bool:
        """Whether there are slots for the next token of a running sequence, others having given up what is not their
        least."""
        return self._sharing.make_room(self._more_blocks(sequence, sequence.num_tokens + 1))

    def _extend(self, sequence: Sequence) -> None:
        """Take slots for the next token, and some ahead where they are free."""
        num_slots, layers = sequence.soon_tokens, self._growing_layers(sequence)
        if self._more_blocks(sequence, num_slots) > self._pool.num_free_blocks:
            num_slots = sequence.num_tokens + 1
        self.block_tables.extend(sequence.seat, layers, num_slots)
        sequence.num_grown_slots = num_slots

    def _misses_slots(self, sequence: Sequence) -> bool:
        is_full = sequence.num_tokens >= sequence.num_grown_slots
        return is_full and bool(self._growing_layers(sequence))

    def _growing_layers(self, sequence: Sequence) -> range:
        """The layers in which a sequence takes slots as it grows; it has as many in each of them."""
        sparse = self._sparse_layers(sequence)
        return range(sparse.stop if sequence.grows_resident else sparse.start)

    def _more_blocks(self, sequence: Sequence, num_slots: int) -> int:
        per_head = num_blocks(num_slots) - num_blocks(sequence.num_grown_slots)
        return max(0, per_head) * len(self._growing_layers(sequence)) * self._shape.num_kv_heads

    def batch(self, sequences: list[Sequence]) -> Batch:
        """A decode batch of sequences that have all advanced."""
        num_seats, some_dense = self._shape.max_num_seqs, self._full_layers > 0
        return Batch.of(sequences, self._kind, self._group_shape, self.buckets, num_seats, some_dense)

    def blank(self, sequences: list[Sequence]) -> Batch:
        """A batch of padding, of the shape of a batch of sequences like these, which hold nothing; with the state that
        its step needs. Raises CapacityError."""
        for sequence in dict.fromkeys(sequences):
            self._serving(sequence).prepare(sequence)
        return self.batch(sequences).blank()

    def _kind(self, sequence: Sequence) -> Kind:
        if not self._sparse_layers(sequence):
            return "", False
        return sequence.policy.name, sequence.can_miss

    def _group_shape(self, sequences: list[Sequence]) -> GroupShape:
        num_lanes = self.buckets.lanes(len(sequences))
        num_tokens = self.buckets.positions(max(sequence.num_tokens for sequence in sequences) + 1)
        return self._serving(sequences[0]).group_shape(sequences, num_lanes, num_tokens, self.buckets)

    def begin_step(self, batch: Batch, table: Tensor) -> list[LayerSteps]:
        """Start a step over the device's copy of the batch's table: its layers, in ranges that are served alike."""
        groups = batch.groups(table)
        first, rest = range(self._full_layers), range(self._full_layers, self._shape.num_layers)
        steps = []
        if batch.shape.dense is not None:
            everyone = Group(batch.shape.dense, 0, LaneInputs.of(table), tuple(batch.sequences))
            steps.append(_layer_steps(first, [self._dense.begin_step(everyone, first)]))
        if rest:
            of_groups = [self._serving(group.sequences[0]).begin_step(group, rest) for group in groups]
            steps.append(_layer_steps(rest, of_groups))
        return steps

    def sight(self, sequence: Sequence, place: LanePlace, most: int) -> Sight | None:
        """See `Cache.sight`; where all layers are dense, of those."""
        layers = self._sparse_layers(sequence) or range(self._shape.num_layers)
        return self._serving(sequence).sight(sequence, place, layers, most)

    def count(self, batch: Batch) -> None:
        """Add a step to the meters of its sequences; before their new tokens count as past."""
        first, rest = range(self._full_layers), range(self._full_layers, self._shape.num_layers)
        for members in batch.members:
            for sequence in members:
                sequence.meter.context_tokens += self._shape.num_layers * sequence.num_tokens
            self._dense.count(members, first)
            self._serving(members[0]).count(members, rest)

    def make_room(self, num_free_blocks: int) -> bool:
        """Have running sequences give up what they can do without until so many blocks are free, if that is enough."""
        return self._sharing.make_room(num_free_blocks)

    def spread(self) -> None:
        """Give running sequences slots that no request waits for."""
        self._sharing.spread()

    def release(self, sequence: Sequence) -> None:
        sparse = self._sparse_layers(sequence)
        if sparse:
            self._keep_prompt(sequence)
        self._sharing.remove(sequence)
        self._dense.release(sequence, range(sparse.start))
        self._serving(sequence).release(sequence, sparse)

    def find_resident(self, sequence: Sequence, names: tuple[bytes, ...], num_known: int) -> None:
        """Of an admitted sequence: where the slabs of its prompt that are known lie in slots, so many of these names,
        and what others may find of a prompt that is compressed."""
        residents = self.residents
        sequence.resident = residents.find(names[:num_known])
        is_kept = sequence.is_compressed and bool(names)
        sequence.left = residents.leave(names, num_known if sequence.resident else 0) if is_kept else None

    def prefilled(self, sequence: Sequence) -> None:
        """Its prompt is computed, and what it read is proven: others may find it. Slots that are all attended stay as
        they are; those of one that recalls may become other tokens' until it ends (`release`)."""
        if sequence.left is not None:
            sequence.left.publish()
        sequence.resident = sequence.left = None
        if not self._sparse_layers(sequence):
            self._keep_prompt(sequence)

    def _keep_prompt(self, sequence: Sequence) -> None:
        """Where each token of a prompt lies at its own place, let others find it there."""
        is_whole = not (sequence.is_compressed or sequence.can_miss) and sequence.num_tokens > 0
        names = sequence.names if is_whole and sequence.shares_prompt else None
        if names and (num_blocks := self.residents.num_blocks(names)):
            layers = range(self._shape.num_layers)
            self.residents.keep(names, self.block_tables.blocks_of(sequence.seat, layers, num_blocks))


def _layer_steps(layers: range, steps: list[GroupStep]) -> LayerSteps:
    return LayerSteps(layers, steps, join([step.new_slots for step in steps]))
