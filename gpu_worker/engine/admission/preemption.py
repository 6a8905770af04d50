"""Preemption where memory runs out, and waiting for a store that is silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from carrel.process.histogram import Histogram
from gpu_worker.caches import CacheSet
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import ArenaFull, CapacityError, StoreUnavailable, WorkerError
from gpu_worker.runner.indexing import Indexing
from gpu_worker.state.sequence import Sequence, Status
from gpu_worker.store.kv_meter import Fallback
from gpu_worker.store.offload import Offloader
from gpu_worker.store.trainings import TrainedLayer

PATIENCE_SECONDS = 10.0
# Between two looks at what the store reads from its disk.
LOOK_SECONDS = 0.05


class Patience:
    """Nothing is tried for those that wait while the store is silent: everyone else goes on meanwhile."""

    def __init__(
        self,
        seconds: float,
        silent_seconds: Callable[[], float],
        stalls: Histogram,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds: that a request waits for the store. silent_seconds: how long it has been silent by now. stalls: of
        those who decode, the seconds that each waited."""
        self._seconds = seconds
        self._silent_seconds = silent_seconds
        self._stalls = stalls
        self._clock = clock
        self._since: dict[Sequence, float] = {}
        # When those that wait for the store's disk are looked at next: the store ends that wait.
        self._looks_at: dict[Sequence, float] = {}

    @property
    def held(self) -> Collection[Sequence]:
        """Return the sequences that need not be tried now."""
        silent = self._since.keys() if self._since and self._silent_seconds() else ()
        return {*silent, *filter(self.looks_later, self._looks_at)} if self._looks_at else silent

    def held_with(self, others: Collection[Sequence]) -> set[Sequence]:
        """These, and who need not be tried now."""
        return {*self.held, *others}

    def look_later(self, sequence: Sequence) -> None:
        """What it needs comes from the store's disk."""
        self._looks_at[sequence] = self._clock() + LOOK_SECONDS

    def looks_later(self, sequence: Sequence) -> bool:
        return self._clock() < self._looks_at.get(sequence, 0.0)

    def wait(self, sequence: Sequence) -> None:
        """It needs the store, which is silent."""
        self._since.setdefault(sequence, self._clock())

    def end(self, sequence: Sequence) -> None:
        """The store has answered it, or it has ended; one that did not wait is no error."""
        since = self._since.pop(sequence, None)
        if since is not None and sequence.status is Status.DECODE:
            self._stalls.observe(self._clock() - since)
        self._looks_at.pop(sequence, None)

    def note(self, waiting: Collection[Sequence], others: Collection[Sequence]) -> None:
        """Some need the store, which is silent, and others not, or no more."""
        for sequence in others:
            self.end(sequence)
        for sequence in waiting:
            self.wait(sequence)

    def note_all(self, sequences: Collection[Sequence]) -> None:
        """All of these need the store: they wait as long as it is silent."""
        if self._silent_seconds():
            self.note(sequences, ())
        else:
            self.note((), sequences)

    def over(self) -> list[Sequence]:
        """Those who waited for so long; all, if the store has been silent for so long."""
        if self._since and self._silent_seconds() >= self._seconds:
            return list(self._since)
        now = self._clock()
        return [sequence for sequence, since in self._since.items() if now - since >= self._seconds]

    def error(self) -> StoreUnavailable:
        """What those end with."""
        return StoreUnavailable(
            f"the KV store, which the request needs, did not answer for {self._seconds:g} s"
        )


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


class Preemption:
    """Who gave way, or was refused by a full arena, waits until one that held room there has ended: to look for it
    earlier would be in vain, or would cost a prompt only to give way again.

    num_preempted: how often a sequence gave way.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        caches: CacheSet,
        offloader: Offloader,
        settle: Callable[[], None],
        free: Callable[[Sequence], None],
        end: Callable[[Sequence, CapacityError], None],
    ) -> None:
        """settle: takes the tokens that are on their way, after which some may have ended. free: frees what a running
        sequence holds, but for its seat. end: ends one that fills the arena, or the slots, alone and needs more."""
        self._scheduler = scheduler
        self._caches = caches
        self._offloader = offloader
        self._settle = settle
        self._free = free
        self._end = end
        self._is_crowded = False
        # Trainings of sequences that are gone: the store frees what they read when they end.
        self._ending: list[TrainedLayer] = []
        self.num_preempted = 0

    def make_room(self, short: list[tuple[Sequence, ArenaFull]]) -> None:
        """Let one that holds room in the arena give way to running sequences that miss some: its room may be enough for
        all of them. It may be one of these; alone such a one goes on without, if it can, or ends."""
        if not short:
            return
        self._settle()
        short = [(each, error) for each, error in short if _runs(each)]
        if not short or self._is_freeing or self._copies_give_way():
            return
        sequence, error = min(short, key=lambda each: each[0].rank)
        holders = self._holders()
        if holders not in ([], [sequence]):
            self._preempt(max(holders, key=lambda holder: holder.rank))
        elif not self._readers_give_way(error.missing_bytes):
            if sequence.status is Status.DECODE and not self._caches.needs_store_to_decode(sequence):
                self._offloader.go_on_without(sequence)
            else:
                self._end(sequence, error)

    def make_slots(self, crowded: list[Sequence]) -> None:
        """Let one that runs give way to those that miss slots for their next tokens; alone such a one ends."""
        if not crowded:
            return
        self._settle()
        crowded = [each for each in crowded if _runs(each) and not self._caches.finds_slots(each)]
        if not crowded:
            return
        if self._scheduler.num_running > 1:
            self._preempt(self._scheduler.last_running)
        else:
            no_slot = "no slot is free for the next token; give more with --slot-memory"
            self._end(crowded[0], CapacityError(no_slot))

    def make_way(self, sequence: Sequence, missing_bytes: float) -> bool:
        """Let running sequences of lower priority give way to a waiting one; False where it must wait all the same.

        missing_bytes: that it missed in the arena when it was tried; infinite where nobody can give it any.
        """
        self._settle()
        leaving = self._leaving(sequence, missing_bytes)
        for other in leaving:
            self._preempt(other)
        return bool(leaving)

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence must not look for room in the arena now."""
        if self._is_freeing or not self._is_crowded:
            return self._is_freeing
        holders = self._holders()
        return bool(holders) and not any(each in holders for each in self._scheduler.lower(sequence))

    def refused(self) -> None:
        """The arena had no room for a waiting sequence."""
        self._is_crowded = True

    def compute_again(self, sequence: Sequence) -> None:
        """A known prefix of a prompt in progress is lost to it: it waits at its old place, to be computed whole."""
        self._free(sequence)
        self._scheduler.wait_again(sequence)
        sequence.begin_again()
        self._offloader.meter.fallbacks[Fallback.RECOMPUTE] += 1

    def left(self, sequence: Sequence, trained: Iterable[TrainedLayer]) -> None:
        """A running sequence was freed while these indexes of it were trained."""
        self._is_crowded &= not sequence.offloads
        # What was not begun never will be: by then another life of the sequence may have its name.
        self._ending += [each for each in trained if not each.future.cancel()]

    @property
    def _is_freeing(self) -> bool:
        """Whether room in the arena will be free without anybody giving way."""
        if self._ending:
            self._ending = [trained for trained in self._ending if not trained.future.done()]
            self._is_crowded &= bool(self._ending)
        return bool(self._ending)

    def _copies_give_way(self) -> bool:
        """Whether room came from copies of prompts, which nobody needs."""
        try:
            return self._offloader.copies.give_way()
        except StoreUnavailable:
            return False

    def _readers_give_way(self, missing_bytes: int) -> bool:
        """Whether so much room may come from known prefixes that prompts read which need no arena: these are computed
        whole instead."""
        copies = self._offloader.copies
        readers = [each for each in self._scheduler.with_status(Status.PREFILL) if copies.known_bytes(each)]
        if sum(map(copies.known_bytes, readers)) < missing_bytes:
            return False
        for each in readers:
            each.trusts_prefixes = False
            self.compute_again(each)
        return bool(readers)

    def _holders(self) -> list[Sequence]:
        """Of room in the arena."""
        return [each for each in self._scheduler.offloading() if self._offloader.holds(each)]

    def _preempt(self, sequence: Sequence) -> None:
        """Take all from a running sequence but its tokens; it waits at its old place, and its stream pauses."""
        self._caches.recall.fetch_counts.take(self._scheduler.offloading())
        self._free(sequence)
        self._is_crowded |= sequence.offloads
        self._scheduler.wait_again(sequence)
        sequence.give_way()
        self.num_preempted += 1

    def _leaving(self, sequence: Sequence, missing_bytes: float) -> list[Sequence]:
        """Sequences of lower priority without which a waiting one would find its room; none where all of them are not
        enough."""
        leaving = self._scheduler.lower(sequence)
        if not self._suffice(sequence, leaving, missing_bytes):
            return []
        # Who gives way last is asked first whether it may stay.
        for other in reversed(leaving):
            others = [each for each in leaving if each is not other]
            if self._suffice(sequence, others, missing_bytes):
                leaving = others
        return leaving

    def _suffice(self, sequence: Sequence, leaving: Collection[Sequence], missing_bytes: float) -> bool:
        return (
            self._scheduler.fits_without(sequence, leaving)
            and self._caches.fits_without(sequence, leaving)
            and sum(self._offloader.own_bytes(other) for other in leaving) >= missing_bytes
        )


def _runs(sequence: Sequence) -> bool:
    return sequence.status not in (Status.WAITING, Status.FINISHED)
