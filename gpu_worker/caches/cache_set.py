"""Chooses the cache of each layer of each sequence, and divides a batch into groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from gpu_worker.caches.base import Cache, GroupStep, ServedLayer
from gpu_worker.caches.dense import DenseCache
from gpu_worker.caches.layer_map import POLICY, LayerMap
from gpu_worker.caches.recall.cache import RecallCache
from gpu_worker.caches.retain.cache import RetainCache
from gpu_worker.caches.slot_sharing import SlotSharing
from gpu_worker.caches.snapshots import LanePlace, Snapshot, spread
from gpu_worker.errors import CapacityError, NeverFits
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.policies.base import CacheShape, Family
from gpu_worker.state.batch import MAX_SCORED, Batch, Buckets, Group, GroupShape, Kind, join
from gpu_worker.state.lane_inputs import LaneInputs
from gpu_worker.state.resident_prefixes import ResidentPrefixes
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool, num_blocks
from gpu_worker.store.link import TrainedLayer


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """The steps of a batch's groups in the layers of one cache, and all their new slots, int32 [B, L, H]."""

    steps: list[GroupStep]
    new_slots: Tensor


class CacheSet:
    """The caches over one pool.

    layers: of the model. A layer is served by one cache for every sequence, or, if it is a layer of policies, by the
    cache of the sequence's policy. block_tables: of the layers of policies.
    """

    def __init__(
        self,
        shape: CacheShape,
        layers: LayerMap,
        pool: SlotPool,
        for_all: Mapping[str, Cache],
        whole: DenseCache,
        retain: RetainCache,
        recall: RecallCache,
        residents: ResidentPrefixes,
    ) -> None:
        """shape: of the model. for_all: by name, the caches that serve every sequence alike. whole: of the layers of
        policies, where a sequence attends everything; retain, recall: where its policy selects."""
        self._shape = shape
        self.layers = layers
        self._pool = pool
        self._for_all = for_all
        self._whole = whole
        self._sparse: dict[Family, Cache] = {Family.RETAIN: retain, Family.RECALL: recall}
        self.retain = retain
        self.recall = recall
        self.block_tables = whole.block_tables
        self._tables = [*(cache.block_tables for cache in for_all.values()), self.block_tables]
        self.buckets = Buckets(is_exact=shape.device.type != "cuda")
        self._sharing = SlotSharing(shape, pool, recall)
        self.residents = residents

    @property
    def num_long(self) -> int:
        """Lanes of the greatest length that one group that selects may have."""
        return max(1, min(self._shape.max_num_seqs, MAX_SCORED // self._shape.max_model_len))

    @property
    def state(self) -> tuple[object, ...]:
        """Objects with addresses that captured steps hold: with other objects the steps are void."""
        own = (*self.recall.state, *self.retain.state)
        return (*own, *(one for cache in self._for_all.values() for one in cache.state))

    def of(self, sequence: Sequence) -> list[ServedLayer]:
        """The cache of each layer of the model, and the layer's number there."""
        caches = {**self._for_all, POLICY: self._serving(sequence)}
        return [
            ServedLayer(caches[place.cache], place.index, kept)
            for place, kept in zip(self.layers.places, self.layers.kept, strict=True)
        ]

    def _selects(self, sequence: Sequence) -> bool:
        """Tell whether a sequence's policy selects in some layer."""
        attends_all = sequence.policy.family is Family.DENSE or not sequence.plan.selects
        return not attends_all and self._whole.num_layers > 0

    def _serving(self, sequence: Sequence) -> Cache:
        """The cache of the layers of policies."""
        return self._sparse[sequence.policy.family] if self._selects(sequence) else self._whole

    def _caches_of(self, sequence: Sequence) -> list[Cache]:
        """The caches that serve some layer of a sequence."""
        caches = [*self._for_all.values(), self._serving(sequence)]
        return [cache for cache in caches if cache.num_layers]

    @property
    def num_free_slots(self) -> int:
        """Free slots of each layer and KV head, if all were shared evenly."""
        return self._pool.num_free_blocks // (self._shape.num_layers * self._shape.num_kv_heads) * BLOCK_SIZE

    def fits_without(self, sequence: Sequence, leaving: Collection[Sequence]) -> bool:
        """Return whether a waiting sequence would find slots if these gave up all of theirs."""
        free = self._sharing.num_free_blocks + self._sharing.num_spare_blocks(leaving)
        free += sum(self._num_held(other) for other in leaving)
        return self._size(sequence, 0) <= free

    def _num_held(self, sequence: Sequence) -> int:
        """Blocks that a sequence holds, those of pages included."""
        slots = sum(tables.num_held(sequence.seat) for tables in self._tables)
        pages = sum(cache.num_held_pages(sequence.seat) for cache in self._caches_of(sequence))
        return slots + self._pool.blocks_of_pages(pages)

    def admit(self, sequence: Sequence) -> bool:
        """Take slots in every layer, and pages for the rest; False if the sequence must wait. Raises NeverFits if it
        never fits.

        Where slots are missing, running sequences give up what they hold beyond their least.
        """
        caches = self._caches_of(sequence)
        if not self._prepare(sequence):
            return False
        alone = self._blocks(sequence, sequence.sure_tokens, self._pool.num_blocks)
        if alone > self._pool.num_blocks:
            missing = (alone - self._pool.num_blocks) * self._pool.block_bytes
            raise NeverFits(
                f"the request needs {missing} bytes of slots more than the pool has; give more with "
                "--slot-memory, or ask for fewer tokens"
            )
        needed = self._size(sequence, self._sharing.num_free_blocks)
        if needed > self._sharing.num_free_blocks:
            if not self._sharing.make_room(needed):
                return False
            self._size(sequence, self._sharing.num_free_blocks)
        # Pages are free as a whole, mostly: blocks are taken and freed by the thousand.
        if not self._pool.has_pages(self._missing_pages(sequence, sequence.num_backed)):
            return False
        if self.recall in caches:
            self._sharing.add(sequence)
        for cache in caches:
            cache.admit(sequence)
        sequence.offloads = self._offloading(sequence).needs_store(sequence)
        return True

    def _prepare(self, sequence: Sequence) -> bool:
        """Have tables that are wide enough; False where it must wait for memory. Raises CapacityError."""
        try:
            for cache in self._caches_of(sequence):
                cache.prepare(sequence)
        except CapacityError:
            if self._pool.num_used_slots:
                return False
            raise
        return True

    def _offloading(self, sequence: Sequence) -> Cache:
        """The cache that decides what goes to the store, also where every layer is dense because the budget covers
        the prompt."""
        return self._sparse.get(sequence.policy.family, self._whole)

    def needs_store_to_decode(self, sequence: Sequence) -> bool:
        """See `Cache.needs_store_to_decode`."""
        return self._offloading(sequence).needs_store_to_decode(sequence)

    def does_without_store(self, sequence: Sequence) -> bool:
        """See `Cache.does_without_store`."""
        return self._offloading(sequence).does_without_store(sequence)

    def held_bytes(self, sequence: Sequence) -> tuple[int, int]:
        """Bytes that the sequence holds: of its slots in all layers, and of its rows in the store."""
        in_store = self._offloading(sequence).bytes_in_store(sequence) if sequence.offloads else 0
        return sum(tables.held_bytes(sequence.seat) for tables in self._tables), in_store

    def _size(self, sequence: Sequence, num_free_blocks: int) -> int:
        """Choose the sequence's slots when so many blocks are free; returns the blocks it takes, in all layers."""
        return self._blocks(sequence, sequence.soon_tokens, num_free_blocks)

    def _blocks(self, sequence: Sequence, num_backed: int, num_free_blocks: int) -> int:
        """The same, with what grows for so many tokens."""
        sequence.num_slots, sequence.num_backed = sequence.capacity, num_backed
        needed = 0
        for cache in self._caches_of(sequence):
            needed += cache.num_blocks(sequence, num_free_blocks - needed)
        return needed

    def advance(self, sequence: Sequence) -> deque[TrainedLayer] | None:
        """Let the window move on for the sequence's next token in every layer; see `Cache.advance`."""
        for cache in self._for_all.values():
            # Only policies have indexes to wait for.
            cache.advance(sequence)
        return self._serving(sequence).advance(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """Take what grows with a sequence for its next token; before any sequence of the step advances, as others may
        give up slots for it. False where there is none."""
        if sequence.num_tokens < sequence.num_backed:
            return True
        if not self.finds_slots(sequence):
            return False
        num_tokens = sequence.soon_tokens
        if not self._has(sequence, num_tokens, self._sharing.num_free_blocks):
            num_tokens = sequence.num_tokens + 1
        for cache in self._caches_of(sequence):
            cache.back(sequence, num_tokens)
        sequence.num_backed = num_tokens
        return True

    def finds_slots(self, sequence: Sequence) -> bool:
        """Return whether there is what grows with a running sequence for its next token. Other sequences shrink to
        their least slots for it."""
        num_tokens = sequence.num_tokens + 1
        self._sharing.make_room(self._more_blocks(sequence, num_tokens))
        # It may have given up slots itself.
        return self._has(sequence, num_tokens, self._pool.num_free_blocks)

    def _has(self, sequence: Sequence, num_tokens: int, num_free_blocks: int) -> bool:
        if self._more_blocks(sequence, num_tokens) > num_free_blocks:
            return False
        return self._pool.has_pages(self._missing_pages(sequence, num_tokens))

    def _missing_pages(self, sequence: Sequence, num_tokens: int) -> int:
        return sum(cache.missing_pages(sequence, num_tokens) for cache in self._caches_of(sequence))

    def _more_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a running sequence lacks for so many tokens, those of pages included."""
        per_head = max(0, num_blocks(num_tokens) - num_blocks(sequence.num_backed))
        growing = (cache.num_layers for cache in self._caches_of(sequence) if cache.grows(sequence))
        pages = self._pool.blocks_of_pages(self._missing_pages(sequence, num_tokens))
        return per_head * sum(growing) * self._shape.num_kv_heads + pages

    def batch(self, sequences: list[Sequence]) -> Batch:
        """A decode batch of sequences that have all advanced."""
        return Batch.of(
            sequences,
            self._kind,
            self._group_shape,
            self.buckets,
            self._shape.max_num_seqs,
            self._shapes_of_all,
        )

    def _shapes_of_all(
        self, sequences: list[Sequence], num_lanes: int, num_tokens: int
    ) -> tuple[GroupShape, ...]:
        caches = self._for_all.values()
        return tuple(cache.group_shape(sequences, num_lanes, num_tokens, self.buckets) for cache in caches)

    def blank(self, sequences: list[Sequence]) -> Batch:
        """A batch of padding, of the shape of a batch of sequences like these, which hold nothing; with the state that
        its step needs. Raises CapacityError."""
        for sequence in dict.fromkeys(sequences):
            self._serving(sequence).prepare(sequence)
        return self.batch(sequences).blank()

    def _kind(self, sequence: Sequence) -> Kind:
        if not self._selects(sequence):
            return "", False
        return sequence.policy.name, sequence.can_miss

    def _group_shape(self, sequences: list[Sequence]) -> GroupShape:
        num_lanes = self.buckets.lanes(len(sequences))
        num_tokens = self.buckets.positions(max(sequence.num_tokens for sequence in sequences) + 1)
        return self._serving(sequences[0]).group_shape(sequences, num_lanes, num_tokens, self.buckets)

    def begin_step(self, batch: Batch, table: Tensor) -> dict[str, LayerSteps]:
        """Start a step over the device's copy of the batch's table, by the caches' names in `layers`."""
        steps = {}
        for (name, cache), shape in zip(self._for_all.items(), batch.shape.everyone, strict=True):
            everyone = Group(shape, 0, LaneInputs.of(table), tuple(batch.sequences))
            steps[name] = _layer_steps([cache.begin_step(everyone)])
        if self._whole.num_layers:
            groups = batch.groups(table)
            of_groups = [self._serving(group.sequences[0]).begin_step(group) for group in groups]
            steps[POLICY] = _layer_steps(of_groups)
        return steps

    def snapshot(self, sequence: Sequence, place: LanePlace, most: int) -> Snapshot | None:
        """See `Cache.snapshot`, of the model's layers; where none selects, of those that attend everything."""
        if not self._selects(sequence):
            dense = [layer for layer, one in enumerate(self.of(sequence)) if one.cache.is_dense]
            return Snapshot(tuple(spread(dense, most)))
        layers = self.layers.layers_of(POLICY)
        snapshot = self._serving(sequence).snapshot(sequence, place, most)
        return snapshot and replace(snapshot, layers=tuple(layers[index] for index in snapshot.layers))

    def count(self, batch: Batch) -> None:
        """Add a step to the meters of its sequences; before their new tokens count as past."""
        for members in batch.members:
            for sequence in members:
                sequence.meter.context_tokens += self._shape.num_layers * sequence.num_tokens
            for cache in self._caches_of(members[0]):
                cache.count(members)

    def make_room(self, num_free_blocks: int) -> bool:
        """Have running sequences give up what they can do without until so many blocks are free, if that is enough."""
        return self._sharing.make_room(num_free_blocks)

    def spread(self) -> None:
        """Give running sequences slots that no request waits for."""
        self._sharing.spread()

    def release(self, sequence: Sequence) -> None:
        if self._selects(sequence):
            self._keep_prompt(sequence)
        self._sharing.remove(sequence)
        for cache in self._caches_of(sequence):
            cache.release(sequence)

    def find_resident(self, sequence: Sequence, names: tuple[bytes, ...], num_known: int) -> None:
        """Find the slots in which an admitted sequence's known slabs lie: the first `num_known` of these names. Note
        what may be left in slots for other requests, where its prompt is compressed."""
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
        if not self._selects(sequence):
            self._keep_prompt(sequence)

    def _keep_prompt(self, sequence: Sequence) -> None:
        """Where each token of a prompt lies at its own place, let others find it there."""
        is_whole = not (sequence.is_compressed or sequence.can_miss) and sequence.num_tokens > 0
        names = sequence.names if is_whole and sequence.shares_prompt else None
        if names and (num_blocks := self.residents.num_blocks(names)):
            held = [
                one.cache.block_tables.blocks_of(sequence.seat, one.index, num_blocks)
                for one in self.of(sequence)
            ]
            self.residents.keep(names, np.stack(held))


def _layer_steps(steps: list[GroupStep]) -> LayerSteps:
    return LayerSteps(steps, join([step.new_slots for step in steps]))
