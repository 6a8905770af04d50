"""What a cache owes the engine: rows in at prefill and at every step, attention out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gpu_worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Group:
    """The sequences of a decode batch that share a cache. rows: their places in the batch, int64 [B]; None: all of
    it. seats: int64 [B]. positions: int64 [B], of the new token."""

    sequences: list[Sequence]
    rows: Tensor | None
    seats: Tensor
    positions: Tensor

    def part_of(self, batch: Tensor) -> Tensor:
        """The group's rows of a tensor of the whole batch."""
        return batch if self.rows is None else batch[self.rows]


class GroupStep(ABC):
    """One decode step of one group. What is the same in all its layers is worked out when it is made, so that a layer
    neither builds tensors from lists nor asks the device for anything, but for what must be fetched."""

    group: Group

    @abstractmethod
    def append(self, layer: int, rows: Tensor) -> None:
        """Write the new tokens' rows [B, H_kv, 2d]."""

    @abstractmethod
    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attention of the new tokens, themselves included: query [B, H_q, d] to the same shape."""

    def finish(self) -> None:
        """After the last layer, before the new tokens count as past."""
        return None


class Cache(ABC):
    """Keeps one layer of some sequences' KV attendable. Slots are assigned by `admit` and freed by `release`."""

    # Whether selection reads an index that must be built at prefill.
    is_indexed: ClassVar[bool] = False

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
    def release(self, sequence: Sequence, layer: int) -> None:
        """Free the slots. Safe to call for a layer that was never admitted."""
