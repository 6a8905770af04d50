"""Live workers: each call renews a worker's lease, silence ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kv_store.errors import FailedPrecondition


@dataclass(slots=True)
class Worker:
    """An attached worker and its response segment (`response_slabs` in a row, possibly none)."""

    worker_id: str
    response_slabs: range
    expires_at: float
    # One response segment: two Gathers of one worker take turns.
    gather_lock: threading.Lock = field(default_factory=threading.Lock)


class WorkerTable:
    """Attached workers by id. `clock` is monotonic, in seconds."""

    def __init__(self, lease_seconds: float, clock: Callable[[], float]) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def add(self, worker_id: str, response_slabs: range) -> Worker:
        worker = Worker(worker_id, response_slabs, self._clock() + self.lease_seconds)
        self._workers[worker_id] = worker
        return worker

    def renew(self, worker_id: str) -> Worker:
        """Raises FailedPrecondition for a worker that never attached or was silent too long."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.expires_at < self._clock():
            raise FailedPrecondition(f"worker {worker_id!r} holds no lease: attach again")
        worker.expires_at = self._clock() + self.lease_seconds
        return worker

    def remove(self, worker_id: str) -> None:
        del self._workers[worker_id]

    def expired(self) -> list[Worker]:
        now = self._clock()
        return [worker for worker in self if worker.expires_at < now]
