"""The interface of a rival."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from benchmarks.runs import Answer


class Rival(ABC):
    """A loaded model that answers one prompt at a time, greedily, in float32 on the CPU."""

    @abstractmethod
    def answer(self, token_ids: Sequence[int], num_tokens: int) -> Answer:
        """Exactly `num_tokens` new tokens: end tokens are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Free what outlives the process."""
