"""Who gives way where room runs out: of the lowest priority the youngest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from gpu_worker.caches import CacheSet
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import ArenaFull, CapacityError, StoreUnavailable
from gpu_worker.state.sequence import Sequence, Status
from gpu_worker.store.kv_meter import Fallback
from gpu_worker.store.offload import Offloader
from gpu_worker.store.trainings import TrainedLayer


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
