"""Sequences with indexes that are still being trained: of their prompt, or of tokens that leave their window."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpu_worker.caches import RecallCache
from gpu_worker.errors import ArenaFull, StoreSilent, WorkerError, run_each
from gpu_worker.runner.prompts.base import Prompt
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.kv_meter import Stall
from gpu_worker.store.link import TrainedLayer
from gpu_worker.store.offload import Offloader

# How long an otherwise idle step waits for an index before it looks for other work again.
POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Taken:
    """Sequences in training, by the result of loading their indexes.

    ready: all of their indexes are loaded.
    short: the arena has no memory for one of their indexes; they stay in training.
    failed: one of their indexes failed.
    """

    ready: list[Sequence] = field(default_factory=list)
    short: list[tuple[Sequence, ArenaFull]] = field(default_factory=list)
    failed: list[tuple[Sequence, WorkerError]] = field(default_factory=list)


class Indexing:
    """Loads indexes as they become ready, layer by layer."""

    def __init__(self, recall: RecallCache, offloader: Offloader) -> None:
        self._recall = recall
        self._offloader = offloader
        self._trained: dict[Sequence, deque[TrainedLayer]] = {}
        # When those came that have to wait.
        self._since: dict[Sequence, float] = {}

    def __len__(self) -> int:
        return len(self._trained)

    def take_early(self, prompts: Iterable[Prompt]) -> Taken:
        """Load the ready indexes of prompts that are being computed: the first of their `trained`, removed there. None
        of these prompts is ready to decode. `ask_again_for` those that are short of memory."""
        taken = Taken()
        trained = {prompt.sequence: prompt.trained for prompt in prompts}
        run_each(
            trained, lambda sequence: self._take_ready(sequence, trained[sequence]), taken.failed, taken.short
        )
        return taken

    def _take_ready(self, sequence: Sequence, trained: deque[TrainedLayer]) -> None:
        while trained and self._recall.load(sequence, trained[0], 0.0):
            trained.popleft()

    def add(self, sequence: Sequence, trained: deque[TrainedLayer]) -> None:
        """Add a sequence with the indexes that it still needs before it decodes; maybe none."""
        sequence.is_prefilled = True
        self._trained[sequence] = trained
        if trained:
            self._since[sequence] = time.monotonic()

    def remove(self, sequence: Sequence) -> deque[TrainedLayer]:
        """Forget a sequence; returns the indexes that it still needed, of an unknown one none."""
        self._since.pop(sequence, None)
        return self._trained.pop(sequence, deque())

    def trained_of(self, sequence: Sequence) -> deque[TrainedLayer]:
        """Return the indexes that a sequence still needs; none of one that is not here."""
        return self._trained.get(sequence, deque())

    def ask_again_for(self, sequence: Sequence, trained: deque[TrainedLayer]) -> None:
        """Have those of a sequence's indexes trained again that failed."""
        for place, layer in enumerate(trained):
            if layer.has_failed:
                trained[place] = self._offloader.link.build_index(sequence, layer.layer, layer.job)

    def take(self, wait: bool) -> Taken:
        """Load what is ready; `ask_again_for` those that are short of memory. A sequence that needs a silent store
        stays."""
        taken = Taken()
        for sequence, trained in self._trained.items():
            try:
                if wait and trained and self._recall.load(sequence, trained[0], POLL_SECONDS):
                    trained.popleft()
                self._take_ready(sequence, trained)
            except ArenaFull as error:
                taken.short.append((sequence, error))
                continue
            except StoreSilent:
                continue
            except WorkerError as error:
                taken.failed.append((sequence, error))
                continue
            if not trained:
                taken.ready.append(sequence)
        for sequence in [*taken.ready, *(sequence for sequence, _ in taken.failed)]:
            del self._trained[sequence]
            if (since := self._since.pop(sequence, None)) is not None:
                self._offloader.meter.stalls[Stall.INDEX].observe(time.monotonic() - since)
        return taken
