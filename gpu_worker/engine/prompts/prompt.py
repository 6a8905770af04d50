"""One of the prompts that are computed together, and what becomes of its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from gpu_worker.device import Mark
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader
from gpu_worker.store.prompt_copies import PromptCopies
from gpu_worker.store.trainings import TrainedLayer


class Prompt(ABC):
    """On its way through the layers to its cache and the arena. `cancel` one that is not done.

    share: of the tokens that are computed together. trained: indexes that were asked for, until they are taken.
    """

    def __init__(self, sequence: Sequence, offloader: Offloader, share: float) -> None:
        self.sequence = sequence
        self.share = share
        self.first, self.num_tokens = sequence.num_cached, sequence.num_prefill
        self.trained: deque[TrainedLayer] = deque()
        self._offloader = offloader
        # Who takes the layers to the arena, and has those of a known prefix.
        self._keeper = keeper(sequence, offloader)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the tokens that are computed."""
        return self.sequence.prefill_token_ids[self.first :]

    @property
    @abstractmethod
    def computed_tokens(self) -> int:
        """Of those that are not cached, each part of its way as its share of the whole."""

    @property
    def left_tokens(self) -> int:
        """Neither computed nor cached."""
        return self.num_tokens - self.first - self.computed_tokens

    @property
    @abstractmethod
    def is_copying(self) -> bool:
        """Whether a finished layer is not known to be in the arena."""

    @abstractmethod
    def take_copied(self) -> None:
        """Seal what is in the arena by now. Raises StoreUnavailable, and StoreSilent where it may be called again once
        the store answers."""

    @abstractmethod
    def wait(self) -> None:
        """Let the host wait until the next finished layer is in the arena, if one is on its way."""

    @abstractmethod
    def cancel(self) -> None:
        """Wait until all copies are done: then the slabs may be given to others."""

    def _note_copied(self, copied: Mark) -> None:
        """What was copied is in the arena: count how long that took, where anything was to be copied."""
        if copied.begun is not None:
            self._offloader.meter.offload.observe(copied.seconds_since(copied.begun))

    def publish(self) -> None:
        """Once all is done: let others find a copy of the prompt."""
        self._offloader.copies.end(self.sequence)
        self.sequence.num_tokens = self.num_tokens


def keeper(sequence: Sequence, offloader: Offloader) -> Offloader | PromptCopies:
    """Who has an admitted sequence's rows in the arena, if anybody."""
    return offloader if sequence.offloads else offloader.copies
