"""What a cache owes the engine: rows in at prefill and at every step, attention out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gpu_worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Group:
    """The sequences of a decode batch that share a cache. rows: their places in the batch, int64 [B]. seats:
    int64 [B]. positions: int64 [B], of the new token."""

    sequences: list[Sequence]
    rows: Tensor
    seats: Tensor
    positions: Tensor


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
    def append(self, layer: int, group: Group, rows: Tensor) -> None:
        """Write the new tokens' rows [B, H_kv, 2d]."""

    @abstractmethod
    def attend(self, layer: int, group: Group, query: Tensor) -> Tensor:
        """Attention of the new tokens, themselves included: query [B, H_q, d] to the same shape."""

    @abstractmethod
    def release(self, sequence: Sequence, layer: int) -> None:
        """Free the slots. Safe to call for a layer that was never admitted."""
