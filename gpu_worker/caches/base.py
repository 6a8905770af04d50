"""The interface of a cache: it stores rows at prefill and at every step, and attends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from gpu_worker.caches.snapshots import LanePlace, Snapshot
from gpu_worker.policies.base import CacheShape, PromptAttention, StepAttention
from gpu_worker.policies.recall import IndexJob
from gpu_worker.row_format import keys_and_values
from gpu_worker.state.batch import Buckets, Group, GroupShape
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.link import TrainedLayer


class GroupStep(StepAttention):
    """One decode step of one group in all layers of a cache. Work that they share is done by the constructor.

    new_slots: int32 [B, L, H_kv], the pool rows that the new tokens take; -1 for padding.
    """

    group: Group
    new_slots: Tensor

    def finish(self) -> None:
        """After the last layer, before the new tokens count as past: measure the step, on the host."""
        return None


class Cache(ABC):
    """Keeps the KV of some layers in slots, assigned by `admit` and freed by `release`. It numbers its layers from 0,
    and serves all of them alike.

    block_tables: where their slots lie.
    """

    # Whether its layers attend everything.
    is_dense: bool = False

    def __init__(self, shape: CacheShape, block_tables: BlockTables) -> None:
        """shape: of its own layers."""
        self._shape = shape
        self.block_tables = block_tables

    @property
    def num_layers(self) -> int:
        return self._shape.num_layers

    @property
    def state(self) -> tuple[object, ...]:
        """Objects with addresses that captured steps hold: with other objects the steps are void."""
        return ()

    @abstractmethod
    def num_blocks(self, sequence: Sequence, num_free_blocks: int) -> int:
        """Blocks that a sequence without any takes in all layers when so many are free, at least what it needs, with
        those of the pages that its other state takes."""

    def missing_pages(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the pages that a sequence lacks for so many tokens, beside its slots."""
        return self.block_tables.missing_pages(sequence.seat, num_tokens)

    def num_held_pages(self, seat: int) -> int:
        """Return the pages of the state that a seat has here, beside its slots."""
        return self.block_tables.num_held_pages(seat)

    def back(self, sequence: Sequence, num_tokens: int) -> None:
        """Have what grows with an admitted sequence for so many tokens. Raises CapacityError."""
        if self.grows(sequence):
            self.block_tables.extend(sequence.seat, num_tokens)

    def grows(self, sequence: Sequence) -> bool:
        """Tell whether an admitted sequence takes slots as it grows, for `num_backed` tokens so far."""
        return False

    def prompt_attention(self, sequence: Sequence) -> PromptAttention | None:
        """How the sequence's prompt is attended in these layers; None: densely."""
        return None

    def needs_store(self, sequence: Sequence) -> bool:
        """Return whether the rows of an admitted sequence must go to the store."""
        return False

    def needs_store_to_decode(self, sequence: Sequence) -> bool:
        """Return whether a decoding sequence with rows in the store needs them there: its slots do not suffice."""
        return True

    def does_without_store(self, sequence: Sequence) -> bool:
        """Return whether an admitted sequence is computed from its slots: its rows go to the store for other requests
        only."""
        return False

    def bytes_in_store(self, sequence: Sequence) -> int:
        """Bytes of the rows of a sequence that offloads; 0 where they are there for measuring only."""
        return 0

    def prepare(self, sequence: Sequence) -> None:
        """Allocate the state that a sequence needs in addition to its slots. Raises CapacityError."""
        return None

    @abstractmethod
    def admit(self, sequence: Sequence) -> None:
        """Take the sequence's slots. Raises CapacityError."""

    @abstractmethod
    def store(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        """Store what is attended of a prefilled layer, as copies. rows: [H_kv, n, 2d]. queries: [H_q, w, d]
        of the last w tokens, as many as the policy reads."""

    def store_layers(self, sequence: Sequence, rows: Tensor) -> None:
        """`store` all layers, of which no queries are read. rows: [L, H_kv, n, 2d]."""
        for layer, of_layer in enumerate(rows):
            self.store(sequence, layer, of_layer, queries=keys_and_values(of_layer)[0][:0, :0])

    def prompt_job(self, sequence: Sequence, layer: int) -> IndexJob | None:
        """Return what the store must train of a prefilled layer of the sequence; None: nothing."""
        return None

    def advance(self, sequence: Sequence) -> deque[TrainedLayer] | None:
        """Reserve slots for the sequence's next token. Raises StoreUnavailable, or StoreSilent where it may be called
        again.

        Returns indexes that must be loaded first, and are to be taken from there once they are: then call it again.
        """
        return None

    @abstractmethod
    def group_shape(
        self, sequences: list[Sequence], num_lanes: int, num_tokens: int, buckets: Buckets
    ) -> GroupShape:
        """Return the shape of a group of sequences of one kind, in so many lanes.

        num_tokens: of the longest sequence with its new token, rounded up.
        """

    @abstractmethod
    def begin_step(self, group: Group) -> GroupStep:
        """Start a decode step; every sequence has a slot for its new token."""

    def snapshot(self, sequence: Sequence, place: LanePlace, most: int) -> Snapshot | None:
        """Return what a sequence attended in the last step, in at most so many layers; None where that is not known.
        Nothing waits for the device."""
        return None

    @abstractmethod
    def count(self, sequences: list[Sequence]) -> None:
        """Add one step in all layers to the sequences' meters; before their new tokens count as past."""

    def release(self, sequence: Sequence) -> None:
        """Free the slots. Safe to call for a sequence that was never admitted."""
        self.block_tables.release(sequence.seat)


@dataclass(frozen=True, slots=True)
class ServedLayer:
    """One layer of the model for one sequence.

    cache: the one that serves it. index: its number there. kept: its number in the arena; None where the arena keeps no
    rows.
    """

    cache: Cache
    index: int
    kept: int | None
