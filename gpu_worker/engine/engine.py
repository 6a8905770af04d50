"""The engine: requests in, tokens out, one iteration at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from gpu_worker.engine.admission import Admission
from gpu_worker.engine.outbox import Outbox
from gpu_worker.engine.pace import Pace
from gpu_worker.engine.patience import Patience
from gpu_worker.engine.preemption import Action, Preemption, Remedy
from gpu_worker.engine.request import Request, Status
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import (
    ArenaFull,
    CapacityError,
    NeverFits,
    PrefixLoading,
    PrefixLost,
    RequestError,
    StoreSilent,
    StoreUnavailable,
    WorkerError,
)
from gpu_worker.records import (
    CompleteEvent,
    EngineInfo,
    EngineStats,
    ErrorEvent,
    EventSink,
    FinishReason,
    GenerationRequest,
)
from gpu_worker.records.plans import (
    BeginStep,
    Outcome,
    Pass,
    Release,
    Released,
    Runner,
    RunnerStats,
    RunQuantum,
    Then,
    Token,
)


@dataclass(slots=True, eq=False)
class _Step:
    """A decode step that was queued. requests: of the step; sampled: those that get a token from it, until it is taken.
    short, crowded: those that found no room in the arena, or no slots."""

    number: int
    requests: list[Request]
    sampled: list[Request]
    has_run: bool
    short: list[tuple[Request, ArenaFull]] = field(default_factory=list)
    crowded: list[Request] = field(default_factory=list)
    is_taken: bool = False
    is_over: bool = False


class Engine:
    """Owns every running request. Single-threaded.

    It decides by numbers and clocks, hands plans to the runner, and applies the outcomes: no other part does. `step`
    is the main loop's body, an iteration: one decode step, then prompts until its time is up. These are queued beside
    it, so that the device has work while the host takes tokens; where there are none the next decode step is.
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
        self._passes: dict[int, Pass] = {}
        self._steps = deque[_Step]()
        # Since freed slots were last given to running requests.
        self._has_freed = False
        self._stats = EngineStats(slot_capacity_tokens=info.slot_capacity_tokens)

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
            self._finish(request, FinishReason.ABORT)
            self._outbox.emit()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> bool:
        """One iteration: a token for each that decodes, then prompts while there is time. False: nothing to do."""
        decoding = self._steps[0] if self._steps else self._begin_step()
        self._outbox.emit()
        prefilled = self._prefill_prompts(decoding)
        if decoding is not None and self._runs_ahead and not prefilled:
            self._begin_step_after(decoding)
        self._end_step(decoding)
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
            for step in tuple(self._steps):
                self._end_step(step)
        self._end_lost(self._runner.renew_store())
        silent_seconds = self._runner.silent_seconds
        self._patience.note_all(self.scheduler.with_status(Status.INDEXING), silent_seconds)
        for request in self._patience.over(silent_seconds):
            self._fail(request, self._patience.error())
        self._outbox.emit()

    def stats(self) -> EngineStats:
        """Counters since the start, and gauges."""
        part = self._runner.stats()
        stalls = {**part.decode_stall_seconds, "store": self._patience.stalls.read()}
        return replace(
            self._stats,
            **{each.name: getattr(part, each.name) for each in fields(RunnerStats)}
            | {"decode_stall_seconds": stalls},
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            waiting_tokens=self.scheduler.num_waiting_tokens,
        )

    def reset_counts(self) -> None:
        """Count from zero again."""
        self._stats = EngineStats(slot_capacity_tokens=self.info.slot_capacity_tokens)
        self._patience.stalls.clear()
        self._runner.reset_counts()

    @property
    def is_store_reachable(self) -> bool:
        """Whether the store answered when last asked, twice a second; any thread may ask."""
        return self._runner.is_store_reachable

    def close(self) -> None:
        """Abort every request and detach from the store."""
        for request in self.scheduler.all():
            self._finish(request, FinishReason.ABORT)
        self._outbox.emit()
        self._runner.close()

    def _prefill_prompts(self, decoding: _Step | None) -> bool:
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
                self.scheduler.serve(self._request(name), share * (seconds or 0.0))
            if not self._run_quantum(RunQuantum(prefill.number, is_timed=True)):
                break
            num_quanta += 1
            left -= seconds or 0.0
            if decoding is not None and not decoding.is_over and self._runner.is_reached(decoding.number):
                self._end_step(decoding)
            if any(each.is_computed for each in self._passes.values()):
                self._finish_prompts(waits=False)
            self._outbox.emit()
        return bool(num_quanta) or self.scheduler.num_waiting < num_waiting

    def _next_pass(self) -> Pass | None:
        """Return the pass of the prompt that is next, admitted if it waited. Where the next one finds no room no other
        overtakes it to the room that comes, but requests that need no arena overtake those that wait for it; and those
        in progress continue."""
        may_admit = may_offload = True
        passes = {name: each for each in self._passes.values() for name in each.shares}
        computed = {self._request(name) for name, each in passes.items() if each.is_computed}
        while True:
            held = {*self._patience.held(self._runner.silent_seconds), *computed}
            request = self.scheduler.next_prompt(may_admit, may_offload, held)
            if request is None:
                break
            if (prefill := passes.get(request.request_id)) is not None:
                return prefill
            if (admitted := self._admit_with_others(request)) is None:
                may_admit, may_offload = request.waits_for_arena, False
            else:
                self._begin_prompts(admitted)
                passes = {name: each for each in self._passes.values() for name in each.shares}
                computed = {self._request(name) for name, each in passes.items() if each.is_computed}
        # The slots that others freed, if no request waits for them.
        if self._has_freed and not self.scheduler.num_waiting:
            self._runner.spread_slots()
            self._has_freed = False
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
            self._end_lost(verdict.lost)
            match verdict.error:
                case None if verdict.is_admitted:
                    self._patience.end(request)
                    return True
                case None:
                    self._take_all()
                    leaving = self._preemption.for_waiting(request, verdict.missing_bytes)
                    if not leaving:
                        self._patience.end(request)
                        return False
                    for other in leaving:
                        self._preempt(other)
                case PrefixLoading():
                    self._patience.look_later(request)
                    return False
                case StoreSilent():
                    self._patience.wait(request)
                    return False
                case NeverFits() as error:
                    self._end_full(request, error)
                    return True
                case error:
                    self._fail(request, error)
                    return True

    def _begin_prompts(self, requests: list[Request]) -> None:
        """Begin the prompts of requests that were admitted together; maybe none."""
        if not requests:
            return
        for request in requests:
            request.clock.admitted = request.clock.admitted or time.monotonic()
        outcome = self._runner.begin_prompts(tuple(each.request_id for each in requests))
        self._note_passes(outcome.passes)
        self._emit(outcome)
        for failure in outcome.failed:
            self._fail(self._request(failure.request_id), failure.error)
        self._stats.cached_tokens_total += sum(
            each.num_cached for each in requests if each.status is Status.PREFILL
        )

    def _run_quantum(self, plan: RunQuantum) -> bool:
        """Run it; False where its prompts wait for a silent store."""
        outcome = self._runner.run_quantum(plan)
        self._note_passes(outcome.passes)
        for failure in outcome.failed:
            request = self._request(failure.request_id)
            match failure.error:
                case PrefixLost():
                    self._recompute(request, Then.RECOMPUTE)
                case error:
                    self._fail(request, error)
        if outcome.short:
            self._make_room(self._short(outcome))
            self._runner.retry_indexes(tuple(name for name, _ in outcome.short))
        self._emit(outcome)
        silent = {each for each in self._found(outcome.silent) if each.runs}
        self._patience.note(silent, {*self._found(outcome.served)} - silent)
        return not silent

    def _finish_prompts(self, waits: bool) -> bool:
        """Take the first tokens of prompts that are computed and stored by now; False for none. waits: for those on
        their way."""
        copied = [
            self._run_quantum(RunQuantum(each.number, waits))
            for each in tuple(self._passes.values())
            if each.is_copying
        ]
        outcome = self._runner.finish_prompts(waits)
        self._note_passes(outcome.passes)
        for request in self._found(outcome.prefilled):
            request.status = Status.INDEXING
            request.clock.prefilled = request.clock.prefilled or time.monotonic()
        ends = self._accept(outcome)
        if outcome.prefilled:
            self._outbox.emit()
            self._runner.keep_prompts()
        self._finish_all(ends)
        return bool(outcome.prefilled) or (waits and any(copied))

    def _load_indexes(self, waits: bool) -> bool:
        """Move requests whose indexes are all there to decoding."""
        if not self.scheduler.with_status(Status.INDEXING):
            return False
        outcome = self._runner.load_indexes(waits)
        for request in self._found(outcome.ready):
            request.status = Status.DECODE
            request.clock.indexed = request.clock.indexed or time.monotonic()
        for failure in outcome.failed:
            self._fail(self._request(failure.request_id), failure.error)
        if outcome.short:
            self._make_room(self._short(outcome))
            self._runner.retry_indexes(tuple(name for name, _ in outcome.short))
        return bool(outcome.ready)

    def _begin_step(self) -> _Step | None:
        """Queue a step of all that decode, whose tokens are known; None where no request does."""
        decoding = self.scheduler.with_status(Status.DECODE)
        return self._queue_step(BeginStep(tuple(each.request_id for each in decoding))) if decoding else None

    def _begin_step_after(self, step: _Step) -> None:
        """Queue the step after this one, whose tokens are not known yet, where that is possible.

        Between two steps the device would wait for the host: until it has the tokens, has looked whether an answer
        ends with one, and has queued the next step. A step's tokens are where the next one reads them, on the device;
        so the next one is queued behind it, of those whose answers continue as far as the host knows. A request that
        turns out to have ended takes part in vain: nothing of that step is emitted.
        """
        # Also where something is left to do for one that took no part.
        if step.is_taken or not step.sampled or len(step.sampled) < len(step.requests):
            return
        running = [each for each in step.requests if each.status is Status.DECODE]
        if self.scheduler.num_waiting or self.scheduler.num_running != len(running):
            return
        following = [each for each in running if each.num_output + 1 < each.asked.sampling.max_tokens]
        if following:
            names = tuple(each.request_id for each in following)
            self._queue_step(BeginStep(names, after=step.number))

    def _queue_step(self, plan: BeginStep) -> _Step | None:
        outcome = self._runner.begin_step(plan)
        if outcome.step is None:
            return None
        step = _Step(
            outcome.step,
            self._found(plan.request_ids),
            self._found(outcome.sampled),
            outcome.has_run,
            self._short(outcome),
            self._found(outcome.crowded),
        )
        self._steps.append(step)
        for request in self._found(outcome.indexing):
            request.status = Status.INDEXING
        self._patience.note(self._found(outcome.silent), self._found(outcome.served))
        self._emit(outcome)
        if outcome.failed:
            # Each has its tokens of the steps before, with which it may have ended.
            self._take_all()
        for failure in outcome.failed:
            if (failed := self.scheduler.find(failure.request_id)) is not None:
                self._fail(failed, failure.error)
        return step

    def _end_step(self, step: _Step | None) -> None:
        if step is None or step.is_over:
            return
        step.is_over = True
        self._take(step)
        seconds = self._runner.end_step(step.number)
        self._steps.remove(step)
        self._make_room(step.short)
        if step.crowded:
            self._take_all()
            self._apply(self._preemption.for_slots(step.crowded))
        if step.has_run:
            self._pace.decoded(seconds)

    def _take_all(self) -> None:
        """Wait for the tokens that are on their way."""
        for step in tuple(self._steps):
            self._take(step)

    def _take(self, step: _Step) -> None:
        """Wait for a step's tokens, if they were not taken yet."""
        if step.is_taken:
            return
        step.is_taken = True
        ends = self._accept(self._runner.take_tokens(step.number))
        if ends and step is not self._steps[-1]:
            # To free what these have waits for the next step, which others' tokens need not.
            self._outbox.emit()
        self._finish_all(ends)

    def _accept(self, outcome: Outcome) -> list[Token]:
        """Take an outcome's tokens; returns those that end an answer."""
        for failure in outcome.failed:
            self._fail(self._request(failure.request_id), failure.error)
        self._emit(outcome)
        for token in outcome.tokens:
            request = self._request(token.request_id)
            request.num_output += 1
            self._stats.generation_tokens_total += 1
            if not token.is_stop:
                self._outbox.put(request, token.event)
        return [token for token in outcome.tokens if token.reason is not None]

    def _finish_all(self, ends: Iterable[Token]) -> None:
        for token in ends:
            request = self.scheduler.find(token.request_id)
            if request is not None and token.reason is not None:
                self._finish(request, token.reason, token.event.token_id if token.is_stop else None)

    def _make_room(self, short: list[tuple[Request, ArenaFull]]) -> None:
        """Let running requests that miss room in the arena find it."""
        if short:
            self._take_all()
            self._apply(self._preemption.for_arena(short))

    def _apply(self, remedies: Iterable[Remedy]) -> None:
        for remedy in remedies:
            match remedy.action:
                case Action.PREEMPT:
                    self._preempt(remedy.request)
                case Action.DISTRUST:
                    self._recompute(remedy.request, Then.DISTRUST)
                case Action.END:
                    assert remedy.error is not None, "an end has a reason"
                    self._end_full(remedy.request, remedy.error)

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request but its tokens; it waits at its old place, and its stream pauses."""
        released = self._free(request, Then.PREEMPT)
        self.scheduler.wait_again(request)
        request.num_prefill, request.num_cached = released.num_prefill, 0
        request.was_preempted, request.waits_for_arena = True, False
        self._stats.preemptions_total += 1

    def _recompute(self, request: Request, then: Then) -> None:
        """Let a prompt in progress wait at its old place, to be computed again."""
        released = self._free(request, then)
        self.scheduler.wait_again(request)
        request.waits_for_arena = released.had_arena
        request.trusts_prefixes = released.trusts_prefixes

    def _finish(self, request: Request, reason: FinishReason, stop_token_id: int | None = None) -> None:
        released = self._remove(request)
        if reason is FinishReason.ABORT:
            self._stats.requests_aborted_total += 1
        else:
            self._stats.requests_finished_total += 1
        usage = request.clock.times(released.usage)
        self._outbox.put(request, CompleteEvent(reason, usage, stop_token_id))

    def _fail(self, request: Request, error: WorkerError) -> None:
        self._remove(request)
        self._stats.requests_failed_total += 1
        self._outbox.put(request, ErrorEvent(error))

    def _end_full(self, request: Request, error: CapacityError) -> None:
        """End one that alone fills the arena, or the slots: in mid-answer it has reached its length."""
        if request.clock.indexed and request.num_output:
            self._finish(request, FinishReason.LENGTH)
        else:
            self._fail(request, error)

    def _end_lost(self, names: Iterable[str]) -> None:
        """End the requests whose rows were lost with an earlier store."""
        for request in self._found(names):
            self._fail(request, StoreUnavailable("the KV store came back empty while the request ran"))

    def _remove(self, request: Request) -> Released:
        released = self._free(request, Then.END)
        self._patience.end(request)
        self.scheduler.remove(request)
        return released

    def _free(self, request: Request, then: Then) -> Released:
        released = self._runner.release(Release(request.request_id, then))
        self._note_passes(released.passes)
        if request.runs:
            self._preemption.released(released, then is Then.PREEMPT)
            self._has_freed = True
        return released

    def _note_passes(self, passes: Iterable[Pass]) -> None:
        for each in passes:
            if each.shares:
                self._passes[each.number] = each
            else:
                self._passes.pop(each.number, None)

    def _emit(self, outcome: Outcome) -> None:
        for name, event in outcome.events:
            if (request := self.scheduler.find(name)) is not None:
                request.sink(event)

    def _short(self, outcome: Outcome) -> list[tuple[Request, ArenaFull]]:
        return [(self._request(name), error) for name, error in outcome.short]

    def _found(self, names: Iterable[str]) -> list[Request]:
        """Return the requests of these names that are not over."""
        return [found for name in names if (found := self.scheduler.find(name)) is not None]

    def _request(self, name: str) -> Request:
        found = self.scheduler.find(name)
        assert found is not None, f"{name} is not over"
        return found
