"""Which sequences wait, prefill and decode. Token counts only: no tensors, no model."""

from __future__ import annotations

from collections import deque

from gpu_worker.state.sequence import Sequence, Status


class Scheduler:
    """First come, first served. One prompt prefills at a time; every decoding sequence takes part in every step."""

    def __init__(self, max_num_seqs: int) -> None:
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))
        self._by_id: dict[str, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_seats(self) -> int:
        return len(self._free_seats)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        self._by_id[sequence.sequence_id] = sequence
        self._waiting.append(sequence)

    def find(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def next_waiting(self) -> Sequence | None:
        """The sequence to admit next, with a seat; None when none waits, no seat is free, or one prefills."""
        if not self._waiting or not self._free_seats or self.with_status(Status.PREFILL):
            return None
        sequence = self._waiting[0]
        if sequence.seat < 0:
            sequence.seat = self._free_seats.pop()
        return sequence

    def admit(self, sequence: Sequence) -> None:
        """Move the first in the queue to the running ones."""
        self._waiting.popleft()
        self._running.append(sequence)
        sequence.status = Status.PREFILL

    def with_status(self, status: Status) -> list[Sequence]:
        return [sequence for sequence in self._running if sequence.status is status]

    def offloading(self) -> list[Sequence]:
        return [sequence for sequence in self._running if sequence.offloads]

    def all(self) -> list[Sequence]:
        return [*self._waiting, *self._running]

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is, and free its seat."""
        self._by_id.pop(sequence.sequence_id, None)
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.seat >= 0:
            self._free_seats.append(sequence.seat)
            sequence.seat = -1
        sequence.status = Status.FINISHED
