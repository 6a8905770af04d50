"""The decode steps that are queued, and the tokens that come of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gpu_worker.engine.outbox import Outbox
from gpu_worker.engine.pace import Pace
from gpu_worker.engine.patience import Patience
from gpu_worker.engine.preemption import Preemption
from gpu_worker.engine.request import Request, Status
from gpu_worker.engine.requests import Requests
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import ArenaFull
from gpu_worker.records.plans import BeginStep, Runner


@dataclass(slots=True, eq=False)
class Step:
    """A decode step that was queued.

    requests: requests in the step.
    sampled: requests that get a token from it, until it is taken.
    short: requests that found the arena full.
    crowded: requests that found no slots.
    """

    number: int
    requests: list[Request]
    sampled: list[Request]
    has_run: bool
    short: list[tuple[Request, ArenaFull]] = field(default_factory=list)
    crowded: list[Request] = field(default_factory=list)
    is_taken: bool = False
    is_over: bool = False


class Steps:
    """Queues steps, ends them in their order, and frees memory for requests that miss some."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        requests: Requests,
        preemption: Preemption,
        patience: Patience,
        pace: Pace,
        outbox: Outbox,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._requests = requests
        self._preemption = preemption
        self._patience = patience
        self._pace = pace
        self._outbox = outbox
        self._queued = deque[Step]()

    def oldest_or_new(self) -> Step | None:
        """Return the oldest step that is queued, or a new one; None where no request decodes."""
        return self._queued[0] if self._queued else self._begin()

    def _begin(self) -> Step | None:
        """Queue a step of all decoding requests, from known tokens; None where no request decodes."""
        decoding = self._scheduler.with_status(Status.DECODE)
        return self._queue(BeginStep(tuple(each.request_id for each in decoding))) if decoding else None

    def begin_after(self, step: Step) -> None:
        """Queue the step after this one before its tokens are known, where that is possible.

        Between two steps the device would wait for the host: until it has the tokens, has checked whether an answer
        ends with one, and has queued the next step. A step's tokens are where the next one reads them, on the device.
        So the next one is queued behind it, for the requests that continue as far as the host knows. A request that
        turns out to have ended takes part in vain: nothing of that step is emitted.
        """
        # Also where something is left to do for one that took no part.
        if step.is_taken or not step.sampled or len(step.sampled) < len(step.requests):
            return
        running = [each for each in step.requests if each.status is Status.DECODE]
        if self._scheduler.num_waiting or self._scheduler.num_running != len(running):
            return
        following = [each for each in running if each.num_output + 1 < each.asked.sampling.max_tokens]
        if following:
            names = tuple(each.request_id for each in following)
            self._queue(BeginStep(names, after=step.number))

    def _queue(self, plan: BeginStep) -> Step | None:
        outcome = self._runner.begin_step(plan)
        if outcome.step is None:
            return None
        step = Step(
            outcome.step,
            self._scheduler.found(plan.request_ids),
            self._scheduler.found(outcome.sampled),
            outcome.has_run,
            self._requests.short(outcome),
            self._scheduler.found(outcome.crowded),
        )
        self._queued.append(step)
        for request in self._scheduler.found(outcome.indexing):
            request.status = Status.INDEXING
        self._patience.note(self._scheduler.found(outcome.silent), self._scheduler.found(outcome.served))
        self._requests.emit(outcome)
        if outcome.failed:
            # Each has its tokens of the steps before, with which it may have ended.
            self.take_all()
        self._requests.fail_each(outcome.failed)
        return step

    def end(self, step: Step) -> None:
        """Take a step's tokens, and wait for its end, unless that was done."""
        if step.is_over:
            return
        step.is_over = True
        self._take(step)
        seconds = self._runner.end_step(step.number)
        self._queued.remove(step)
        self.make_room(step.short)
        if step.crowded:
            self.take_all()
            self._requests.apply(self._preemption.for_slots(step.crowded))
        if step.has_run:
            self._pace.decoded(seconds)

    def take_all(self) -> None:
        """Wait for the tokens that are on their way."""
        for step in tuple(self._queued):
            self._take(step)

    def _take(self, step: Step) -> None:
        """Wait for a step's tokens, if they were not taken yet."""
        if step.is_taken:
            return
        step.is_taken = True
        ends = self._requests.accept(self._runner.take_tokens(step.number))
        if ends and step is not self._queued[-1]:
            # To free what these have waits for the next step, which others' tokens need not.
            self._outbox.emit()
        self._requests.finish_all(ends)

    def make_room(self, short: list[tuple[Request, ArenaFull]]) -> None:
        """Free arena memory for running requests that miss it."""
        if short:
            self.take_all()
            self._requests.apply(self._preemption.for_arena(short))

    def end_all(self) -> None:
        """End every step that is queued."""
        for step in tuple(self._queued):
            self.end(step)
