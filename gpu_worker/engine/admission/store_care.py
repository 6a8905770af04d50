"""Looks after the requests of a store that is silent, or was lost."""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker.engine.admission.patience import Patience
from gpu_worker.engine.indexing import Indexing
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import StoreUnavailable, WorkerError
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader


class StoreCare:
    """fail: ends a sequence with an error."""

    def __init__(
        self,
        scheduler: Scheduler,
        indexing: Indexing,
        offloader: Offloader,
        patience: Patience,
        fail: Callable[[Sequence, WorkerError], None],
    ) -> None:
        self._scheduler = scheduler
        self._indexing = indexing
        self._offloader = offloader
        self._patience = patience
        self._fail = fail

    def tend(self) -> None:
        """Check the store, attach to it again if need be, and end those that waited too long."""
        if self._offloader.renew():
            self.end_lost()
        self._patience.note_all(self._indexing.sequences)
        for sequence in self._patience.over():
            self._fail(sequence, self._patience.error())

    def end_lost(self) -> None:
        """End the sequences whose rows were lost with an earlier store."""
        for sequence in self._scheduler.offloading():
            if not self._offloader.holds(sequence):
                self._fail(sequence, StoreUnavailable("the KV store came back empty while the request ran"))
