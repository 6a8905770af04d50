"""The interface of rivals in the decode and prefill benchmarks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from benchmarks.figures import DecodeCase, DecodeFigures, PrefillCase, PrefillFigures


class DecodeRival(ABC):
    """A model with random weights that stays loaded from case to case; it alone uses the device of its process."""

    @abstractmethod
    def measure(self, case: DecodeCase) -> DecodeFigures:
        """Fill a cache at random and decode. Frees all but the weights, also when it fails.

        Raises NotMeasurable where this rival cannot do the case, torch.OutOfMemoryError where it does not fit.
        """


class PrefillRival(ABC):
    """As DecodeRival, for prompts."""

    @abstractmethod
    def measure(self, case: PrefillCase) -> PrefillFigures:
        """Prefill a random prompt of the case's length several times. Frees and raises as DecodeRival does."""
