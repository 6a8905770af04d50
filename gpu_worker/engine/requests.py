"""The requests of an engine: how they end, and how they are preempted."""

from __future__ import annotations

from collections.abc import Iterable

from gpu_worker.engine.outbox import Outbox
from gpu_worker.engine.passes import Passes
from gpu_worker.engine.patience import Patience
from gpu_worker.engine.preemption import Preemption, Remedy
from gpu_worker.engine.request import Request
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import ArenaFull, CapacityError, StoreUnavailable, WorkerError
from gpu_worker.records import CompleteEvent, EngineStats, ErrorEvent, FinishReason
from gpu_worker.records.plans import Failure, Outcome, Release, Released, Runner, Then, Token


class Requests:
    """Releases what requests hold, and tells their callers.

    counts: of requests and tokens, since the start. has_freed: slots became free since this was set to False.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        preemption: Preemption,
        patience: Patience,
        passes: Passes,
        outbox: Outbox,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._preemption = preemption
        self._patience = patience
        self._passes = passes
        self._outbox = outbox
        self.counts = EngineStats()
        self.has_freed = False

    def running(self, name: str) -> Request:
        """Return a request that is not over."""
        found = self._scheduler.find(name)
        assert found is not None, f"{name} is not over"
        return found

    def finish(self, request: Request, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """End a request well, or because it was aborted."""
        released = self._remove(request)
        if reason is FinishReason.ABORT:
            self.counts.requests_aborted_total += 1
        else:
            self.counts.requests_finished_total += 1
        usage = request.clock.times(released.usage)
        self._outbox.put(request, CompleteEvent(reason, usage, stop_token_id))

    def fail(self, request: Request, error: WorkerError) -> None:
        """End a request with an error."""
        self._remove(request)
        self.counts.requests_failed_total += 1
        self._outbox.put(request, ErrorEvent(error))

    def fail_each(self, failed: Iterable[Failure]) -> None:
        """End the requests of an outcome that failed, but for those that are over."""
        for failure in failed:
            for request in self._scheduler.found([failure.request_id]):
                self.fail(request, failure.error)

    def end_full(self, request: Request, error: CapacityError) -> None:
        """End one that alone fills the arena, or the slots: in mid-answer it has reached its length."""
        if request.clock.indexed and request.num_output:
            self.finish(request, FinishReason.LENGTH)
        else:
            self.fail(request, error)

    def end_lost(self, names: Iterable[str]) -> None:
        """End the requests that lost their rows with an earlier store."""
        for request in self._scheduler.found(names):
            self.fail(request, StoreUnavailable("the KV store came back empty while the request ran"))

    def preempt(self, request: Request) -> None:
        """Take everything from a running request but its tokens; it waits at its old place, and its stream pauses."""
        released = self._free(request, Then.PREEMPT)
        self._scheduler.wait_again(request)
        request.num_prefill, request.num_cached = released.num_prefill, 0
        request.was_preempted, request.waits_for_arena = True, False
        request.trusts_prefixes = released.trusts_prefixes
        self.counts.preemptions_total += 1

    def recompute(self, request: Request, then: Then) -> None:
        """Let a prompt in progress wait at its old place, to be computed again."""
        released = self._free(request, then)
        self._scheduler.wait_again(request)
        request.waits_for_arena = released.had_arena
        request.trusts_prefixes = released.trusts_prefixes

    def accept(self, outcome: Outcome) -> list[Token]:
        """Take an outcome's tokens; returns those that end an answer."""
        self.fail_each(outcome.failed)
        self.emit(outcome)
        for token in outcome.tokens:
            request = self.running(token.request_id)
            request.num_output += 1
            self.counts.generation_tokens_total += 1
            if not token.is_stop:
                self._outbox.put(request, token.event)
        return [token for token in outcome.tokens if token.reason is not None]

    def finish_all(self, ends: Iterable[Token]) -> None:
        """End the answers that these tokens end, unless they are over."""
        for token in ends:
            request = self._scheduler.find(token.request_id)
            if request is not None and token.reason is not None:
                self.finish(request, token.reason, token.event.token_id if token.is_stop else None)

    def apply(self, remedies: Iterable[Remedy]) -> None:
        """Preempt, recompute or end requests so that others find memory."""
        for remedy in remedies:
            match remedy.then:
                case Then.PREEMPT:
                    self.preempt(remedy.request)
                case Then.RECOMPUTE | Then.DISTRUST as then:
                    self.recompute(remedy.request, then)
                case Then.END:
                    assert remedy.error is not None, "an end has a reason"
                    self.end_full(remedy.request, remedy.error)

    def emit(self, outcome: Outcome) -> None:
        """Emit an outcome's events at once."""
        for name, event in outcome.events:
            if (request := self._scheduler.find(name)) is not None:
                request.sink(event)

    def short(self, outcome: Outcome) -> list[tuple[Request, ArenaFull]]:
        """Return the requests of an outcome that found the arena full."""
        return [(found, error) for name, error in outcome.short for found in self._scheduler.found([name])]

    def _remove(self, request: Request) -> Released:
        released = self._free(request, Then.END)
        self._patience.end(request)
        self._scheduler.remove(request)
        return released

    def _free(self, request: Request, then: Then) -> Released:
        released = self._runner.release(Release(request.request_id, then))
        self._passes.note(released.passes)
        if request.runs:
            self._preemption.released(released, then is Then.PREEMPT)
            self.has_freed = True
        return released
