"""The engine: requests in, tokens out, one iteration at a time."""

from __future__ import annotations

import time
from dataclasses import fields, replace

from gpu_worker.engine.admission import Admission
from gpu_worker.engine.outbox import Outbox
from gpu_worker.engine.pace import Pace
from gpu_worker.engine.passes import Passes
from gpu_worker.engine.patience import Patience
from gpu_worker.engine.preemption import Preemption
from gpu_worker.engine.request import Request, Status
from gpu_worker.engine.requests import Requests
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.engine.steps import Step, Steps
from gpu_worker.errors import (
    NeverFits,
    PrefixLoading,
    PrefixLost,
    RequestError,
    StoreSilent,
)
from gpu_worker.records import (
    EngineInfo,
    EngineStats,
    EventSink,
    FinishReason,
    GenerationRequest,
)
from gpu_worker.records.plans import (
    Outcome,
    Pass,
    Runner,
    RunnerStats,
    RunQuantum,
    Then,
)


class Engine:
    """The owner of every running request. Single-threaded.

    It decides by numbers and clocks, hands plans to the runner, and applies the outcomes: no other part does. `step` is
    the main loop's body, an iteration: one decode step, then prompts until its time is up. Prompts are queued while the
    step runs, so that the device has work while the host accepts tokens. Without prompts the next decode step is
    queued.
    """

    def __init__(
        self,
        info: EngineInfo,
        runner: Runner,
        scheduler: Scheduler,
        admission: Admission,
        preemption: Preemption,
        patience: Patience,
        pace: Pace,
        outbox: Outbox,
        runs_ahead: bool = False,
    ) -> None:
        """runs_ahead: whether a decode step is queued before the tokens of the one before are taken, where it can
        be."""
        self.info = info
        self._runner = runner
        self.scheduler = scheduler
        self._admission = admission
        self._preemption = preemption
        self._patience = patience
        self._pace = pace
        self._outbox = outbox
        self._runs_ahead = runs_ahead
        self._passes = Passes()
        self._requests = Requests(runner, scheduler, preemption, patience, self._passes, outbox)
        self._steps = Steps(runner, scheduler, self._requests, preemption, patience, pace, outbox)

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Queue a checked request; `sink` gets its events from within `step`. Raises RequestError if its id is
        running, and for options that its policy does not take."""
        if self.scheduler.find(request.request_id):
            raise RequestError(
                f"request_id {request.request_id!r} belongs to a running request", "request_id"
            )
        entered = self._runner.enter(request)
        self.scheduler.add(Request(request, sink, entered, entered.num_prefill))

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds, at once. An unknown id is no error."""
        if request := self.scheduler.find(request_id):
            self._requests.finish(request, FinishReason.ABORT)
            self._outbox.emit()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> bool:
        """One iteration: a token for each that decodes, then prompts while there is time. False: nothing to do."""
        decoding = self._steps.oldest_or_new()
        self._outbox.emit()
        prefilled = self._prefill_prompts(decoding)
        if decoding is not None and self._runs_ahead and not prefilled:
            self._steps.begin_after(decoding)
        if decoding is not None:
            self._steps.end(decoding)
        worked = prefilled or (decoding is not None and decoding.has_run)
        finished = self._finish_prompts(waits=not worked)
        worked = self._load_indexes(waits=not (worked or finished)) or worked or finished
        # Else the next step's turn emits, once it is queued. First tokens do not wait: a new shape is captured first.
        if prefilled or finished or not self.scheduler.with_status(Status.DECODE):
            self._outbox.emit()
        return worked

    def check_store(self) -> None:
        """Check the store; to be called now and then, between steps, with or without work."""
        if not self.has_work:
            self._steps.end_all()
        self._requests.end_lost(self._runner.renew_store())
        silent_seconds = self._runner.silent_seconds
        self._patience.note_all(self.scheduler.with_status(Status.INDEXING), silent_seconds)
        for request in self._patience.over(silent_seconds):
            self._requests.fail(request, self._patience.error())
        self._outbox.emit()

    def stats(self) -> EngineStats:
        """Counters since the start, and gauges."""
        part = self._runner.stats()
        stalls = {**part.decode_stall_seconds, "store": self._patience.stalls.read()}
        return replace(
            self._requests.counts,
            slot_capacity_tokens=self.info.slot_capacity_tokens,
            context_capacity=self.info.context_capacity,
            **{each.name: getattr(part, each.name) for each in fields(RunnerStats)}
            | {"decode_stall_seconds": stalls},
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            waiting_tokens=self.scheduler.num_waiting_tokens,
        )

    def reset_counts(self) -> None:
        """Count from zero again."""
        self._requests.counts = EngineStats()
        self._patience.stalls.clear()
        self._runner.reset_counts()

    @property
    def is_store_reachable(self) -> bool:
        """Return whether the store answered when last asked, twice a second; any thread may ask."""
        return self._runner.is_store_reachable

    def close(self) -> None:
        """Abort every request and detach from the store."""
        for request in self.scheduler.all():
            self._requests.finish(request, FinishReason.ABORT)
        self._outbox.emit()
        self._runner.close()

    def _prefill_prompts(self, decoding: Step | None) -> bool:
        """Run quanta of the prompts that are next, one at least, as many as fit the iteration. Tokens are taken and
        emitted as soon as they are there: to queue the quanta may take the host longer than the device takes for the
        step."""
        self._pace.prefilled(self._runner.settle())
        num_waiting, num_quanta = self.scheduler.num_waiting, 0
        left = self._pace.prefill_seconds(decoding is not None)
        while (prefill := self._next_pass()) is not None:
            seconds = self._pace.seconds(prefill.work, prefill.kind)
            if num_quanta and (seconds is None or seconds > left):
                break
            for name, share in prefill.shares.items():
                self.scheduler.serve(self._requests.running(name), share * (seconds or 0.0))
            if not self._run_quantum(RunQuantum(prefill.number, is_timed=True)):
                break
            num_quanta += 1
            left -= seconds or 0.0
            if decoding is not None and not decoding.is_over and self._runner.is_reached(decoding.number):
                self._steps.end(decoding)
            if self._passes.computed:
                self._finish_prompts(waits=False)
            self._outbox.emit()
        return bool(num_quanta) or self.scheduler.num_waiting < num_waiting

    def _next_pass(self) -> Pass | None:
        """Return the pass of the prompt that is next, admitted if it waited. While the next one lacks memory, no later
        prompt may take memory that frees up. Requests that need no arena overtake those that wait for it; prompts in
        progress continue."""
        may_admit = may_offload = True
        while True:
            silent_seconds = self._runner.silent_seconds
            held = {*self._patience.held(silent_seconds), *self.scheduler.found(self._passes.computed)}
            request = self.scheduler.next_prompt(may_admit, may_offload, held)
            if request is None:
                break
            if (prefill := self._passes.of(request.request_id)) is not None:
                return prefill
            if (admitted := self._admit_with_others(request)) is None:
                may_admit, may_offload = request.waits_for_arena, False
            else:
                self._begin_prompts(admitted)
        # The slots that others freed, if no request waits for them.
        if self._requests.has_freed and not self.scheduler.num_waiting:
            self._runner.spread_slots()
            self._requests.has_freed = False
        return None

    def _admit_with_others(self, request: Request) -> list[Request] | None:
        """Admit a waiting prompt, and short ones with it. Returns those that were admitted, maybe none; None where it
        must wait, and others not before it."""
        if not self._admit(request):
            return [] if self._patience.looks_later(request) else None
        together, held = [request], self._patience.held(self._runner.silent_seconds)
        while (other := self._admission.next_beside(together, held)) is not None and self._admit(other):
            together.append(other)
        # One that was admitted may have ended since, or may have been preempted for a later one.
        return [each for each in dict.fromkeys(together) if each.status is Status.PREFILL]

    def _admit(self, request: Request) -> bool:
        """Admit one, others being preempted perhaps, or end it with an error; False where it must wait."""
        while True:
            verdict = self._admission.attempt(request)
            self._requests.end_lost(verdict.lost)
            match verdict.error:
                case None if verdict.is_admitted:
                    self._patience.end(request)
                    return True
                case None:
                    self._steps.take_all()
                    leaving = self._preemption.for_waiting(request, verdict.missing_bytes)
                    if not leaving:
                        self._patience.end(request)
                        return False
                    for other in leaving:
                        self._requests.preempt(other)
                case PrefixLoading():
                    self._patience.look_later(request)
                    return False
                case StoreSilent():
                    self._patience.wait(request)
                    return False
                case NeverFits() as error:
                    self._requests.end_full(request, error)
                    return True
                case error:
                    self._requests.fail(request, error)
                    return True

    def _begin_prompts(self, requests: list[Request]) -> None:
        """Begin the prompts of requests that were admitted together; maybe none."""
        if not requests:
            return
        for request in requests:
            request.clock.admitted = request.clock.admitted or time.monotonic()
        outcome = self._runner.begin_prompts(tuple(each.request_id for each in requests))
        self._passes.note(outcome.passes)
        self._requests.emit(outcome)
        self._requests.fail_each(outcome.failed)
        self._requests.counts.cached_tokens_total += sum(
            each.num_cached for each in requests if each.status is Status.PREFILL
        )

    def _run_quantum(self, plan: RunQuantum) -> bool:
        """Run it; False where its prompts wait for a silent store."""
        outcome = self._runner.run_quantum(plan)
        self._passes.note(outcome.passes)
        for failure in outcome.failed:
            # One may have failed twice.
            for request in self.scheduler.found([failure.request_id]):
                match failure.error:
                    case PrefixLost() if request.runs:
                        self._requests.recompute(request, Then.RECOMPUTE)
                    case PrefixLost():
                        pass
                    case error:
                        self._requests.fail(request, error)
        self._make_room_for_indexes(outcome)
        self._requests.emit(outcome)
        silent = {each for each in self.scheduler.found(outcome.silent) if each.runs}
        self._patience.note(silent, {*self.scheduler.found(outcome.served)} - silent)
        return not silent

    def _finish_prompts(self, waits: bool) -> bool:
        """Take the first tokens of prompts that are computed and stored by now; False for none. waits: for those on
        their way."""
        copied = [
            self._run_quantum(RunQuantum(each.number, waits))
            for each in self._passes.copying
            # A quantum before it may have preempted its requests.
            if each.number in self._passes
        ]
        outcome = self._runner.finish_prompts(waits)
        self._passes.note(outcome.passes)
        for request in self.scheduler.found(outcome.prefilled):
            request.status = Status.INDEXING
            request.clock.prefilled = request.clock.prefilled or time.monotonic()
        ends = self._requests.accept(outcome)
        if outcome.prefilled:
            self._outbox.emit()
            self._runner.keep_prompts()
        self._requests.finish_all(ends)
        return bool(outcome.prefilled) or (waits and any(copied))

    def _load_indexes(self, waits: bool) -> bool:
        """Move requests to decoding once all of their indexes are there."""
        if not self.scheduler.with_status(Status.INDEXING):
            return False
        outcome = self._runner.load_indexes(waits)
        for request in self.scheduler.found(outcome.ready):
            request.status = Status.DECODE
            request.clock.indexed = request.clock.indexed or time.monotonic()
        self._requests.fail_each(outcome.failed)
        self._make_room_for_indexes(outcome)
        return bool(outcome.ready)

    def _make_room_for_indexes(self, outcome: Outcome) -> None:
        """Free arena memory for the requests of an outcome that miss it, and ask for their indexes once more."""
        if outcome.short:
            self._steps.make_room(self._requests.short(outcome))
            self._runner.retry_indexes(tuple(name for name, _ in outcome.short))
