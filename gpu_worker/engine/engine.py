"""The engine: requests in, tokens out, one iteration at a time."""

from __future__ import annotations

import time

import torch

from gpu_worker.caches import CacheSet
from gpu_worker.device import Mark
from gpu_worker.engine.admission.admission import Admission, Intake
from gpu_worker.engine.admission.preemption import PATIENCE_SECONDS, Patience, Preemption, StoreCare
from gpu_worker.engine.gauges import Gauges
from gpu_worker.engine.outbox import Outbox
from gpu_worker.engine.pace import Pace, PromptSeconds, Span
from gpu_worker.engine.scheduler import STRETCH, Scheduler
from gpu_worker.errors import (
    CapacityError,
    InvalidLogits,
    PrefixLost,
    RequestError,
    StoreSilent,
    WorkerError,
)
from gpu_worker.models import Decoder
from gpu_worker.records import (
    CompleteEvent,
    EngineInfo,
    EngineStats,
    ErrorEvent,
    EventSink,
    FinishReason,
    GenerationRequest,
    TokenEvent,
)
from gpu_worker.runner.indexing import Indexing
from gpu_worker.runner.prompts.in_progress import AnyPass, MakePrefill, Prefills
from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.runner.prompts.prompt_memory import PromptRoom
from gpu_worker.runner.steps.decode import DecodeStep
from gpu_worker.runner.steps.drawing import FirstTokens
from gpu_worker.runner.steps.step_queue import Decoding, End, StepQueue
from gpu_worker.sampling import Sampler
from gpu_worker.state.sequence import Sequence, Status
from gpu_worker.state.slot_pool import SlotPool
from gpu_worker.store.kv_meter import Stall
from gpu_worker.store.offload import Offloader
from gpu_worker.store.prefixes import PrefixChain


class Engine:
    """Owns every running request. Single-threaded. `step` is the main loop's body, an iteration: one decode step, then
    prompts until its time is up. These are queued beside it, so that the device has work while the host takes tokens;
    where there are none the next decode step is. Benchmarks and tests read its public parts."""

    def __init__(
        self,
        info: EngineInfo,
        intake: Intake,
        decoder: Decoder,
        pool: SlotPool,
        caches: CacheSet,
        offloader: Offloader,
        decode: DecodeStep,
        prefill_chunk: int,
        make_prefill: MakePrefill = Prefill,
        prefixes: PrefixChain | None = None,
        itl_seconds: float | None = None,
        stretch: float = STRETCH,
        store_patience_seconds: float = PATIENCE_SECONDS,
        max_joining: int = 0,
        runs_ahead: bool = False,
    ) -> None:
        """prefixes: names the prefixes that requests may share; None: nothing is shared. itl_seconds, stretch,
        store_patience_seconds, max_joining: see `Pace`, `Scheduler`, `Patience` and `Admission`. runs_ahead: whether a
        decode step is queued before the tokens of the one before are taken, where it can be."""
        self.info = info
        self._intake = intake
        self._decoder = decoder
        self.pool = pool
        self.caches = caches
        self.offloader = offloader
        self.decode = decode
        self._sampler = Sampler()
        self._pace = Pace(lambda: Mark(decoder.device), itl_seconds)
        room = PromptRoom(info.max_model_len, prefill_chunk)
        estimate = PromptSeconds(self._pace, decoder.config, room)
        self.scheduler = Scheduler(info.max_num_seqs, room, estimate, stretch)
        self._preemption = Preemption(
            self.scheduler, caches, offloader, self._take_all, self._free, self._end_full
        )
        self.prefills = Prefills(make_prefill, decoder, caches, offloader, prefill_chunk, info.max_model_len)
        self.indexing = Indexing(caches.recall, offloader)
        stalls = offloader.meter.stalls[Stall.STORE]
        self._patience = Patience(store_patience_seconds, lambda: offloader.silent_seconds, stalls)
        self._store_care = StoreCare(self.scheduler, self.indexing, offloader, self._patience, self._fail)
        for_room = (self._preemption, self._patience, self._store_care, max_joining)
        self._admission = Admission(
            self.scheduler, intake, caches, offloader, prefixes, *for_room, self._fail, self._end_full
        )
        self._outbox = Outbox(decoder.device)
        # Tokens that are on their way after prompts.
        self._first_tokens = FirstTokens(self._sampler)
        self._steps = StepQueue(
            decode,
            self.scheduler,
            offloader,
            self.indexing,
            self._patience,
            self._sampler,
            self._pace.mark,
            caches.recall.fetch_counts.copy,
            self._fail_step,
        )
        self._runs_ahead = runs_ahead
        # Since freed slots were last given to running sequences.
        self._has_freed = False
        self._stats = EngineStats(slot_capacity_tokens=info.slot_capacity_tokens)
        parts = (self.scheduler, self._preemption, self.prefills, caches, pool, offloader)
        self._gauges = Gauges(*parts, decoder.config.num_layers * decoder.config.num_kv_heads)

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Queue a checked request; `sink` gets its events from within `step`. Raises RequestError if its id is
        running."""
        if self.scheduler.find(request.request_id):
            raise RequestError(
                f"request_id {request.request_id!r} belongs to a running request", "request_id"
            )
        sequence = self._intake.sequence(request, sink)
        self._admission.expect(sequence)
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds, at once. An unknown id is no error."""
        if sequence := self.scheduler.find(request_id):
            self._finish(sequence, FinishReason.ABORT)
            self._outbox.tell()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> bool:
        """One iteration: a token for each that decodes, then prompts while there is time. False: nothing to do."""
        decoding = self._steps.oldest or self._steps.begin(self._stats)
        self._outbox.tell()
        prefilled = self._prefill_prompts(decoding)
        if decoding is not None and self._runs_ahead and not prefilled:
            self._steps.begin_next(decoding, self._stats)
        self._end_decode(decoding)
        worked = prefilled or (decoding is not None and decoding.has_run)
        finished = self._finish_prefills(wait=not worked)
        worked = self._take_indexes(wait=not (worked or finished)) or worked or finished
        # Else the next step tells, once it is queued. First tokens do not wait: one of a new shape is captured first.
        if prefilled or finished or not self.scheduler.with_status(Status.DECODE):
            self._outbox.tell()
        return worked

    def _prefill_prompts(self, decoding: Decoding | None) -> bool:
        """Quanta of the prompts that are next, one at least, as many as fit the iteration. Tokens are taken and told as
        soon as they are there: to queue the quanta may take the host longer than the device takes for the step."""
        self._pace.settle()
        num_waiting, spans = self.scheduler.num_waiting, list[Span]()
        left = self._pace.prefill_seconds(decoding is not None)
        while (prefill := self._next_prefill()) is not None:
            work, kind = prefill.next_work, prefill.next_kind
            seconds = self._pace.seconds(work, kind)
            if spans and (seconds is None or seconds > left):
                break
            for prompt in prefill.prompts:
                self.scheduler.serve(prompt.sequence, prompt.share * (seconds or 0.0))
            begun = spans[-1].ended if spans else self._pace.mark()
            if not self._run_quantum(prefill):
                break
            spans.append(Span(begun, self._pace.mark(), work, kind))
            left -= seconds or 0.0
            if decoding is not None and decoding.ended.is_reached:
                self._end_decode(decoding)
            if self._first_tokens:
                self._finish_prefills(wait=False)
            self._outbox.tell()
        self._pace.prefilled(spans)
        return bool(spans) or self.scheduler.num_waiting < num_waiting

    def _next_prefill(self) -> AnyPass | None:
        """The prompt that is next, admitted if it waited. Where the next one finds no room nobody overtakes it to the
        room that comes, but who needs no arena overtakes those who wait for it; and those in progress go on."""
        may_admit = may_offload = True
        next_prompt, held = self.scheduler.next_prompt, self._patience.held_with
        while (sequence := next_prompt(may_admit, may_offload, held(self.prefills.computed))) is not None:
            if (prefill := self.prefills.get(sequence)) is not None:
                return prefill
            if (admitted := self._admission.admit(sequence)) is None:
                may_admit, may_offload = sequence.offloads, False
            else:
                self._begin_prefill(admitted)
        # The slots that others freed, if no request waits for them.
        if self._has_freed and not self.scheduler.num_waiting:
            self.caches.spread()
            self._has_freed = False
        return None

    def _begin_prefill(self, sequences: list[Sequence]) -> None:
        """Of sequences that were admitted together; maybe none."""
        try:
            self.prefills.begin(sequences)
        except CapacityError as error:
            for sequence in sequences:
                self._fail(sequence, error)
            return
        for sequence in sequences:
            sequence.clock.admitted = sequence.clock.admitted or time.monotonic()
            self._stats.cached_tokens_total += sequence.num_cached
            sequence.tell_progress(0)

    def tend(self) -> None:
        """Check the store; to be called now and then, between steps, with or without work."""
        if not self.has_work:
            for step in self._steps:
                self._end_decode(step)
        self._store_care.tend()
        self._outbox.tell()

    def _run_quantum(self, prefill: AnyPass, wait: bool = True) -> bool:
        """False where it waits for a silent store. wait: see `PromptPass.advance`."""
        failed, silent = prefill.advance(wait), set()
        failed += self._first_tokens.draw_after(prefill, self._stats)
        self._stats.prompt_tokens_total += prefill.count_computed()
        taken = self.indexing.take_early(prefill.prompts)
        for sequence, error in (*failed, *taken.failed):
            match error:
                case PrefixLost():
                    self._preemption.compute_again(sequence)
                case StoreSilent():
                    silent.add(sequence)
                case _:
                    self._fail(sequence, error)
        if taken.short:
            self._preemption.make_room(taken.short)
            for prompt in prefill.prompts:
                self.indexing.ask_again_for(prompt.sequence, prompt.trained)
        for prompt in prefill.prompts:
            prompt.sequence.tell_progress(prompt.computed_tokens)
        silent -= {prompt.sequence for prompt in prefill.done}
        running = {prompt.sequence for prompt in prefill.prompts}
        self._patience.note(silent & running, running - silent)
        return not silent & running

    def _finish_prefills(self, wait: bool) -> bool:
        """First tokens of prompts that are computed and stored by now; False for none. wait: for those on their way."""
        copied = [self._run_quantum(prefill, wait) for prefill in self.prefills.copying]
        done = [prompt for prompt in self.prefills.done if self._first_tokens.is_there(prompt.sequence, wait)]
        for prompt in done:
            self.prefills.finish(prompt)
            self.indexing.add(prompt.sequence, prompt.trained)
            events = self._first_tokens.take(prompt.sequence)
            ends = [self._take_one(prompt.sequence, event) for event in events]
            self._outbox.tell()
            self.prefills.keep(prompt)
            for end in filter(None, ends):
                self._finish(*end)
        return bool(done) or (wait and any(copied))

    def _take_indexes(self, wait: bool) -> bool:
        """Move sequences whose indexes are all there to decoding."""
        taken = self.indexing.take(wait)
        for sequence in taken.ready:
            sequence.status = Status.DECODE
            sequence.clock.indexed = sequence.clock.indexed or time.monotonic()
        for sequence, error in taken.failed:
            self._fail(sequence, error)
        self._preemption.make_room(taken.short)
        self.indexing.ask_again(taken.short)
        return bool(taken.ready)

    def _fail_step(self, sequences: list[Sequence], error: WorkerError) -> None:
        """Rows could not be recalled, or memory ran out; half of the step may be queued. Each has its tokens of the
        steps before, with which it may have ended."""
        self._pace.mark().wait()
        self._take_all()
        for sequence in sequences:
            if sequence.status is not Status.FINISHED:
                self._fail(sequence, error)

    def _end_decode(self, decoding: Decoding | None) -> None:
        if decoding is None or decoding.is_over:
            return
        decoding.is_over = True
        self._take(decoding)
        # Where all tokens were forced none was waited for.
        decoding.ended.wait()
        self._steps.end(decoding)
        self._preemption.make_room(decoding.short)
        self._preemption.make_slots(decoding.crowded)
        if decoding.has_run:
            self._pace.decoded(decoding.begun, decoding.ended)

    def _take_all(self) -> None:
        """Wait for the tokens that are on their way."""
        for step in self._steps:
            self._take(step)

    def _take(self, step: Decoding) -> None:
        """Wait for its tokens, if they were not taken yet."""
        drawn, step.drawn = step.drawn, None
        taken = [*drawn.take()] if drawn is not None else []
        ends = [end for sequence, event in taken if (end := self._take_one(sequence, event)) is not None]
        if ends and not self._steps.is_last(step):
            # To free what these have waits for the next step, which others' tokens need not.
            self._outbox.tell()
        for end in ends:
            self._finish(*end)

    def _take_one(self, sequence: Sequence, event: TokenEvent | None) -> End | None:
        """The answer's end, where it ends with this token."""
        try:
            return self._accept(sequence, event)
        except (InvalidLogits, RequestError) as error:
            self._fail(sequence, error)
            return None

    def _accept(self, sequence: Sequence, event: TokenEvent | None) -> End | None:
        if event is None:
            raise InvalidLogits(sequence.sequence_id)
        sequence.take(event.token_id)
        self._stats.generation_tokens_total += 1
        is_end = event.token_id in sequence.sampler.end_token_ids
        if not is_end:
            self._outbox.put(sequence, event)
        reason = sequence.reason_to_end
        return None if reason is None else End(sequence, reason, event.token_id if is_end else None)

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_token_id: int | None = None) -> None:
        self.caches.recall.fetch_counts.take(self.scheduler.offloading())
        usage = sequence.usage(*self.caches.held_bytes(sequence))
        self._release(sequence)
        if reason is FinishReason.ABORT:
            self._stats.requests_aborted_total += 1
        else:
            self._stats.requests_finished_total += 1
        self._outbox.put(sequence, CompleteEvent(reason, usage, stop_token_id))

    def _fail(self, sequence: Sequence, error: WorkerError) -> None:
        self.caches.recall.fetch_counts.take(self.scheduler.offloading())
        self._release(sequence)
        self._stats.requests_failed_total += 1
        self._outbox.put(sequence, ErrorEvent(error))

    def _end_full(self, sequence: Sequence, error: CapacityError) -> None:
        """End one that alone fills the arena, or the slots: in mid-answer it has reached its length."""
        if sequence.clock.indexed and sequence.generated:
            self._finish(sequence, FinishReason.LENGTH)
        else:
            self._fail(sequence, error)

    def _release(self, sequence: Sequence) -> None:
        self._gauges.add_ended(sequence, self._stats)
        if sequence.status not in (Status.WAITING, Status.FINISHED):
            self._free(sequence)
        self._patience.end(sequence)
        self.scheduler.remove(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Free what a running sequence holds, but for its seat."""
        # Slabs that it writes to become others'.
        self._steps.wait_for(sequence)
        trained = [*self.indexing.remove(sequence), *self.prefills.cancel(sequence)]
        self._first_tokens.forget(sequence)
        self.caches.release(sequence)
        self.offloader.release(sequence)
        self._preemption.left(sequence, trained)
        self._has_freed = True

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of now."""
        return self._gauges.read_into(self._stats)

    def reset_counts(self) -> None:
        """Count from zero again."""
        self._stats = EngineStats(slot_capacity_tokens=self.info.slot_capacity_tokens)
        self._preemption.num_preempted = 0
        self.offloader.reset_counts()

    @property
    def is_store_reachable(self) -> bool:
        """Whether the store answered when last asked, twice a second; any thread may ask."""
        return self.offloader.is_reachable

    def close(self) -> None:
        """Abort every request and detach from the store."""
        for sequence in self.scheduler.all():
            self._finish(sequence, FinishReason.ABORT)
        self._outbox.tell()
        self.offloader.close()
