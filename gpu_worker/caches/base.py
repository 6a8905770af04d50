"""The interface of a cache: it stores rows at prefill and at every step, and attends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from torch import Tensor

from gpu_worker.caches.sight import LanePlace, Sight, spread
from gpu_worker.policies.base import StepAttention
from gpu_worker.policies.recall import IndexJob
from gpu_worker.row_format import keys_and_values
from gpu_worker.state.batch import Buckets, Group, GroupShape
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.trainings import TrainedLayer


class GroupStep(StepAttention):
    """One decode step of one group in some layers. Work that all layers share is done by the constructor.

    new_slots: int32 [B, layers, H_kv], the pool rows that the new tokens take; -1 for padding.
    """

    group: Group
    new_slots: Tensor

    def finish(self) -> None:
        """After the last layer, before the new tokens count as past: measure the step, on the host."""
        return None


class Cache(ABC):
    """Keeps the KV of one layer of some sequences in slots, assigned by `admit` and freed by `release`."""

    # Whether its layers attend everything.
    is_dense: bool = False

    @abstractmethod
    def num_blocks(self, sequence: Sequence, num_layers: int, num_free_blocks: int) -> int:
        """Blocks that the sequence takes in so many layers when so many are free; at least what it needs."""

    def needs_store(self, sequence: Sequence) -> bool:
        """Whether the rows of an admitted sequence must go to the store."""
        return False

    def needs_store_to_decode(self, sequence: Sequence) -> bool:
        """Whether a decoding sequence whose rows go to the store needs them there: it cannot go on from its slots."""
        return True

    def does_without_store(self, sequence: Sequence) -> bool:
        """Whether an admitted sequence's rows go to the store for others' sake only: it is computed from its slots."""
        return False

    def bytes_in_store(self, sequence: Sequence) -> int:
        """Bytes of the rows of a sequence that offloads; 0 where they are there for measuring only."""
        return 0

    def prepare(self, sequence: Sequence) -> None:
        """Allocate the state that a sequence needs beside its slots. Raises CapacityError."""
        return None

    @abstractmethod
    def admit(self, sequence: Sequence, layers: range) -> None:
        """Take the sequence's slots in these layers. Raises CapacityError."""

    @abstractmethod
    def store(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        """Store what is attended of a prefilled layer, as copies. rows: [H_kv, n, 2d]. queries: [H_q, w, d]
        of the last w tokens, as many as the policy reads."""

    def store_layers(self, sequence: Sequence, layers: range, rows: Tensor) -> None:
        """`store` some layers of which no queries are read. rows: [L, H_kv, n, 2d]."""
        for layer, of_layer in zip(layers, rows, strict=True):
            self.store(sequence, layer, of_layer, queries=keys_and_values(of_layer)[0][:0, :0])

    def prompt_job(self, sequence: Sequence, layer: int) -> IndexJob | None:
        """What the store must train of a prefilled layer of the sequence; None: nothing."""
        return None

    @abstractmethod
    def advance(self, sequence: Sequence, layers: range) -> deque[TrainedLayer] | None:
        """Make room for the sequence's next token in these layers. Raises StoreUnavailable, or StoreSilent where it may
        be called again.

        Returns indexes that must be loaded first, and are to be taken from there once they are: then call it again.
        """

    @abstractmethod
    def group_shape(
        self, sequences: list[Sequence], num_lanes: int, num_tokens: int, buckets: Buckets
    ) -> GroupShape:
        """Of sequences of one kind, in so many lanes. num_tokens: of the longest with its new token, rounded up."""

    @abstractmethod
    def begin_step(self, group: Group, layers: range) -> GroupStep:
        """Start a decode step in these layers; every sequence has room for its new token."""

    def sight(self, sequence: Sequence, place: LanePlace, layers: range, most: int) -> Sight | None:
        """What a sequence attended in the step that was just made, in at most so many of these layers; None: it cannot
        be told. Nothing waits for the device."""
        return Sight(tuple(spread(layers, most)))

    @abstractmethod
    def count(self, sequences: list[Sequence], layers: range) -> None:
        """Add one step in these layers to the sequences' meters; before their new tokens count as past."""

    @abstractmethod
    def release(self, sequence: Sequence, layers: range) -> None:
        """Free the slots. Safe to call for layers that were never admitted."""
