"""The state that the store's parts share: one lock, the arena's bookkeeping, and eviction."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from carrel.process.histogram import Histogram
from kv_store.arena import Arena
from kv_store.calls import CallMeter
from kv_store.checksums import SlabChecksums
from kv_store.client.errors import StaleEpoch
from kv_store.client.layout import Layout, SlabGeometry
from kv_store.errors import out_of_space
from kv_store.prefixes import PrefixDirectory
from kv_store.sequences import Sequence, SequenceTable, Worker
from kv_store.sessions import SessionDirectory
from kv_store.slabs import Among, SlabAllocator

_log = logging.getLogger(__name__)

# What nobody used for so long is evicted first, whoever's it is.
UNUSED_SECONDS = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """The slabs that trainers read, and those of the index that they write; held until they end, whoever asked."""

    source: npt.NDArray[np.int32]
    segment: range


@dataclass(slots=True)
class Counters:
    """Under the store's lock. Names are those of `StoreStats`. prefix_lookup_tokens: of prompts, in whole slabs, that
    were looked for; prefix_hit_tokens: that were found. evicted_*: given up to make room."""

    training_seconds: float = 0.0
    num_trainings: int = 0
    gathered_rows: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    evicted_bytes: int = 0
    evicted_sessions: int = 0
    expired_leases: int = 0


class StoreState:
    """Every method but `entered`, `bytes_of` and `close` expects the caller to hold `lock`."""

    def __init__(
        self,
        arena: Arena,
        slab_bytes: int,
        lease_seconds: float,
        clock: Callable[[], float],
        num_comparing: int = 1,
    ) -> None:
        """num_comparing: threads that compare checksums."""
        self.lock = threading.RLock()
        self._clock = clock
        self.arena = arena
        self.epoch = arena.handle.epoch
        self.slab_bytes = slab_bytes
        self.allocator = SlabAllocator(arena.handle.num_bytes // slab_bytes)
        self.workers: dict[str, Worker] = {}
        self._lease_seconds = lease_seconds
        self.sequences = SequenceTable()
        self.trainings: list[Training] = []
        self.prefixes = PrefixDirectory(self.allocator, clock)
        self.sessions = SessionDirectory(self.allocator)
        self.checksums = SlabChecksums(
            arena.data[: self.allocator.num_slabs * slab_bytes], slab_bytes, num_comparing
        )
        self.counters = Counters()
        self.calls = CallMeter()
        # Of one layer of a sequence, and of the rows of a call; under `lock` as all here.
        self.search_seconds = Histogram()
        self.gather_seconds = Histogram()
        self._geometry: SlabGeometry | None = None

    @property
    def geometry(self) -> SlabGeometry:
        """How slabs are cut. Raises StaleEpoch before the first Attach."""
        if self._geometry is None:
            raise StaleEpoch("no worker has attached yet")
        return self._geometry

    def adopt_layout(self, layout: Layout) -> SlabGeometry:
        """Cut the slabs for this layout; a new one drops what was cached under the old.

        Raises StaleEpoch while another worker uses a different layout.
        """
        if self._geometry is not None and self._geometry.layout == layout:
            return self._geometry
        geometry = SlabGeometry(layout, self.slab_bytes)
        if self._geometry is not None:
            if self.workers:
                raise StaleEpoch(
                    f"the arena holds {self._geometry.layout}, this worker wants {layout}: "
                    "start a second store for the second model"
                )
            self.sessions.clear()
            self.prefixes.clear()
        self._geometry = geometry
        return geometry

    @contextlib.contextmanager
    def entered(self, epoch: int, worker_id: str) -> Iterator[StoreState]:
        """Hold `lock` for a call of this worker. Raises StaleEpoch."""
        with self.lock:
            self.enter(epoch, worker_id)
            yield self

    def enter(self, epoch: int, worker_id: str) -> Worker:
        """Renew the worker's lease. Raises StaleEpoch, also for another start's epoch."""
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch {epoch} is not this store's: it was restarted, attach again")
        worker, now = self.workers.get(worker_id), self._clock()
        if worker is None or worker.expires_at < now:
            raise StaleEpoch(f"worker {worker_id!r} holds no lease: attach again")
        worker.expires_at = now + self._lease_seconds
        return worker

    def add_worker(self, worker_id: str, response_slabs: range) -> None:
        self.workers[worker_id] = Worker(worker_id, response_slabs, self._clock() + self._lease_seconds)

    def make_room(self, num_slabs: int, what: str, owner: str) -> None:
        """Evict until `num_slabs` are free for `owner`. Raises StoreFull, without evicting, when that cannot work."""
        self._check_room(num_slabs, what)
        while (missing := num_slabs - self.allocator.num_free) > 0:
            if not self._evict(missing, owner, num_slabs):
                break

    def _check_room(self, num_slabs: int, what: str) -> None:
        if (missing := num_slabs - self.allocator.num_free) > 0:
            missing -= self.prefixes.num_evictable_slabs(self.sessions.counts, missing)
        if missing > 0:
            raise out_of_space(what, missing * self.slab_bytes)

    def allocate_segment(self, num_bytes: int, what: str, owner: str = "") -> range:
        """Slabs in a row for `num_bytes`. Raises StoreFull, without evicting, when no run would be long enough."""
        count = -(-num_bytes // self.slab_bytes)
        if count == 0:
            return range(0)
        if (slabs := self.allocator.allocate_run(count, owner)) is None:
            self._check_room(count, what)
            longest = self.allocator.longest_run(self.prefixes.evictable_slabs(self.sessions.counts))
            if longest < count:
                raise out_of_space(f"{what} in one piece", (count - longest) * self.slab_bytes)
        while slabs is None:
            if not self._evict(max(1, count - self.allocator.num_free), owner, count):
                raise RuntimeError("what was to be evicted is not there")
            slabs = self.allocator.allocate_run(count, owner)
        return slabs

    def _evict(self, num_slabs: int, asking: str, num_asked: int) -> bool:
        """Give up so many slabs of prefixes that nobody used for long; where there are none, of the owner that holds
        the most with what it asks for; or, where all of that one's are in sessions, the oldest session that is its own
        or that nobody used for long. Pinned ones are the last. False: there is nothing to give up."""
        owners, are_unused = self.allocator.owners, partial(self.prefixes.are_unused, UNUSED_SECONDS)
        if self._evict_prefixes(num_slabs, are_unused):
            return True
        for owner in owners.largest_first(asking, num_asked):
            are_own = partial(owners.are_of, owner)
            if self._evict_prefixes(num_slabs, are_own) or self._give_up_session(
                _either(are_own, are_unused)
            ):
                return True
        return self._give_up_session(None)

    def _evict_prefixes(self, num_slabs: int, among: Among) -> bool:
        before = self.allocator.num_free
        is_evicted = self.prefixes.evict(num_slabs, among)
        self.counters.evicted_bytes += (self.allocator.num_free - before) * self.slab_bytes
        return is_evicted

    def _give_up_session(self, among: Among | None) -> bool:
        given_up = self.sessions.give_up_oldest(among)
        self.counters.evicted_sessions += given_up
        return given_up

    def bytes_of(self, slab_ids: npt.NDArray[np.int32]) -> list[npt.NDArray[np.uint8]]:
        """The bytes of each of these slabs where they lie, uint8 [slab_bytes]. No lock is needed."""
        size = self.slab_bytes
        return [self.arena.data[slab * size : (slab + 1) * size] for slab in slab_ids.tolist()]

    def forget_corrupt(self, slab_ids: npt.NDArray[np.int32]) -> None:
        """Let nobody find what was listed over these slabs, nor what sequences over them would list."""
        names = self.prefixes.drop_slabs(slab_ids)
        self.sessions.give_up(names)
        for sequence in self.sequences:
            sequence.is_corrupt |= bool(np.isin(sequence.table, slab_ids).any())
        _log.error(
            "%d slabs of the arena no longer hold what was written there (the first is slab %d): %d prefixes over them "
            "are forgotten; where this comes again, test this machine's memory",
            slab_ids.size,
            slab_ids[0],
            len(names),
        )

    def close(self) -> None:
        """End what reads the arena beside calls."""
        self.checksums.close()

    def drop_sequence(self, sequence: Sequence) -> None:
        """Give up the sequence's references; its private slabs and its indexes are free at once."""
        self.sequences.remove(sequence)
        self.allocator.release(sequence.table.ravel())
        for index in sequence.indexes:
            self.allocator.release(index.slabs)
        # What a trainer has not begun is given up, and the slabs it would have read; what it has begun ends first.
        for training in sequence.trainings:
            training.cancel()

    def drop_worker(self, worker: Worker) -> None:
        """Forget a worker and everything it holds."""
        for sequence in self.sequences.of_worker(worker.worker_id):
            self.drop_sequence(sequence)
        self.allocator.release(worker.response_slabs)
        del self.workers[worker.worker_id]

    def drop_expired(self) -> int:
        """Forget the workers whose leases are over; returns how many."""
        now = self._clock()
        expired = [worker for worker in self.workers.values() if worker.expires_at < now]
        for worker in expired:
            self.drop_worker(worker)
        self.counters.expired_leases += len(expired)
        return len(expired)


def _either(first: Among, second: Among) -> Among:
    return lambda slab_ids: first(slab_ids) | second(slab_ids)
