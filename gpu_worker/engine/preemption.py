"""Decides which requests are preempted where memory runs out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gpu_worker.engine.request import Request, Status
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import ArenaFull, CapacityError
from gpu_worker.records.plans import Leaving, Released, Runner, Then


@dataclass(frozen=True, slots=True)
class Remedy:
    """A release of a request that frees memory for other requests. error: of one that ends: it is alone and needs more
    than there is."""

    then: Then
    request: Request
    error: CapacityError | None = None


class Preemption:
    """Chooses the requests to preempt; the engine acts on it, and reports each release to `released`.

    A request that was preempted, or refused by a full arena, waits until one that held arena memory has ended. An
    earlier attempt would be in vain, or would cost a prompt only to be preempted again.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        """runner: is asked for numbers, and drops copies that no request needs."""
        self._scheduler = scheduler
        self._runner = runner
        self._is_crowded = False
        # Arena memory was about to become free when last seen.
        self._was_freeing = False

    def for_arena(self, short: list[tuple[Request, ArenaFull]]) -> list[Remedy]:
        """Return the remedies for running requests that miss arena memory: one holder's may be enough for all of them.
        It may be one of these; alone such a one continues without, if it can, or ends."""
        short = [(each, error) for each, error in short if each.runs]
        if not short or self._is_freeing() or self._runner.drop_copies():
            return []
        request, error = min(short, key=lambda each: each[0].rank)
        holders = self._holders()
        if holders not in ([], [request]):
            return [Remedy(Then.PREEMPT, max(holders, key=lambda holder: holder.rank))]
        if readers := self._scheduler.found(self._runner.readers(error.missing_bytes)):
            return [Remedy(Then.DISTRUST, reader) for reader in readers]
        if request.status is Status.DECODE and self._runner.leave_arena(request.request_id):
            return []
        return [Remedy(Then.END, request, error)]

    def for_slots(self, crowded: list[Request]) -> list[Remedy]:
        """Return the remedy for running requests that miss slots for their next tokens; alone such a one ends."""
        names = tuple(each.request_id for each in crowded if each.runs)
        missing = self._scheduler.found(self._runner.without_slots(names)) if names else []
        if not missing:
            return []
        if self._scheduler.num_running > 1:
            return [Remedy(Then.PREEMPT, self._scheduler.last_running)]
        no_slot = "no slot is free for the next token; give more with --slot-memory"
        return [Remedy(Then.END, missing[0], CapacityError(no_slot))]

    def for_waiting(self, request: Request, missing_bytes: float) -> list[Request]:
        """Return the requests of lower priority without which a waiting one would fit, as few as possible; none where
        all of them are not enough. missing_bytes: of the arena; infinite where no request can free any."""
        leaving = self._scheduler.lower(request)
        if not self._suffices(request, leaving, missing_bytes):
            return []
        # The one that is preempted last is asked first whether it may stay.
        for other in reversed(leaving):
            others = [each for each in leaving if each is not other]
            if self._suffices(request, others, missing_bytes):
                leaving = others
        return leaving

    def must_wait(self, request: Request) -> bool:
        """Return whether a waiting request must not ask for arena memory now."""
        is_freeing = self._is_freeing()
        if is_freeing or not self._is_crowded:
            return is_freeing
        holders = self._holders()
        return bool(holders) and not any(each in holders for each in self._scheduler.lower(request))

    def refused(self) -> None:
        """Note that the arena had no memory for a waiting request."""
        self._is_crowded = True

    def released(self, released: Released, was_preempted: bool) -> None:
        """Note what a running request left behind."""
        self._is_crowded &= not released.had_arena
        self._was_freeing |= released.is_freeing
        if was_preempted:
            self._is_crowded |= released.had_arena

    def _is_freeing(self) -> bool:
        is_freeing = self._runner.is_freeing()
        if self._was_freeing and not is_freeing:
            self._is_crowded = False
        self._was_freeing = is_freeing
        return is_freeing

    def _holders(self) -> list[Request]:
        return self._scheduler.found(self._runner.holders())

    def _suffices(self, request: Request, leaving: Collection[Request], missing_bytes: float) -> bool:
        names = tuple(each.request_id for each in leaving)
        return self._scheduler.fits_without(request, leaving) and self._runner.finds_room(
            Leaving(request.request_id, names, missing_bytes)
        )
