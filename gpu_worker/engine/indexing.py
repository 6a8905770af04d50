"""Prefilled sequences whose indexes are still being trained."""

from __future__ import annotations

from collections import deque

from gpu_worker.caches import RecallCache
from gpu_worker.errors import WorkerError
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import TrainedLayer

# How long an otherwise idle step waits for an index before it looks for other work again.
POLL_SECONDS = 0.005


class Indexing:
    """Loads indexes as they become ready, layer by layer."""

    def __init__(self, recall: RecallCache) -> None:
        self._recall = recall
        self._trained: dict[Sequence, deque[TrainedLayer]] = {}

    def __len__(self) -> int:
        return len(self._trained)

    def take_early(self, sequence: Sequence, trained: deque[TrainedLayer]) -> None:
        """Load the ready indexes of a sequence, also while it is being prefilled: the first of `trained`, removed
        there.

        Raises StoreUnavailable and CapacityError.
        """
        while trained and self._recall.load(sequence, trained[0], 0.0):
            trained.popleft()

    def add(self, sequence: Sequence, trained: deque[TrainedLayer]) -> None:
        """Add a prefilled sequence with the indexes that it still needs before it decodes; maybe none."""
        self._trained[sequence] = trained

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; an unknown one is no error."""
        self._trained.pop(sequence, None)

    def take(self, wait: bool) -> tuple[list[Sequence], list[tuple[Sequence, WorkerError]]]:
        """The sequences whose indexes are all loaded now, and those with a failed index, with its error."""
        ready, failed = [], []
        for sequence, trained in self._trained.items():
            try:
                if wait and trained and self._recall.load(sequence, trained[0], POLL_SECONDS):
                    trained.popleft()
                self.take_early(sequence, trained)
            except WorkerError as error:
                failed.append((sequence, error))
                continue
            if not trained:
                ready.append(sequence)
        for sequence in [*ready, *(sequence for sequence, _ in failed)]:
            del self._trained[sequence]
        return ready, failed
