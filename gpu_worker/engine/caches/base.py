"""What a cache owes the engine: rows in at prefill and at every step, attention out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gpu_worker.engine.batch import Group
from gpu_worker.engine.sequence import Sequence


class GroupStep(ABC):
    """One decode step of one group in some layers. What is the same in all of them is done when it is made.

    new_slots: int32 [B, layers, H_kv], the pool rows that the new tokens take; -1 for padding.
    """

    group: Group
    new_slots: Tensor

    @abstractmethod
    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attention of the new tokens, which are in their slots by now: query [B, H_q, d] to the same shape."""

    def finish(self) -> None:
        """After the last layer, before the new tokens count as past: what is measured of the step, on the host."""
        return None


class Cache(ABC):
    """Keeps one layer of some sequences' KV attendable. Slots are assigned by `admit` and freed by `release`."""

    # Whether selection reads an index that the store must build from a prefilled layer.
    wants_index: bool = False

    @abstractmethod
    def num_slots(self, sequence: Sequence, num_free_slots: int) -> int:
        """Slots wanted for each KV head and layer; at least what the sequence cannot do without."""

    @abstractmethod
    def admit(self, sequence: Sequence, layer: int) -> None:
        """Take the sequence's slots for this layer. Raises CapacityError."""

    @abstractmethod
    def store(self, sequence: Sequence, layer: int, rows: Tensor) -> None:
        """Keep what is attended of a prefilled layer. rows: [H_kv, n, 2d]; not kept by reference."""

    @abstractmethod
    def begin_step(self, group: Group, layers: range) -> GroupStep:
        """Start a decode step in these layers; every sequence has room for its new token."""

    @abstractmethod
    def count(self, sequences: list[Sequence], layers: range) -> None:
        """Add one step in these layers to the sequences' meters; before their new tokens count as past."""

    @abstractmethod
    def release(self, sequence: Sequence, layer: int) -> None:
        """Free the slots. Safe to call for a layer that was never admitted."""
