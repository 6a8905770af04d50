"""The runner of one rank: executes the engine's plans on its device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpu_worker.caches import CacheSet
from gpu_worker.errors import (
    CapacityError,
    InvalidLogits,
    RequestError,
    StoreSilent,
    StoreUnavailable,
    WorkerError,
)
from gpu_worker.records import GenerationRequest, ProgressEvent, TokenEvent
from gpu_worker.records.plans import (
    Admit,
    Admitted,
    BeginStep,
    Entered,
    Failure,
    Leaving,
    Measured,
    Outcome,
    Pass,
    Release,
    Released,
    RunnerStats,
    RunQuantum,
    Then,
    Token,
)
from gpu_worker.runner.indexing import Indexing
from gpu_worker.runner.intake import Intake
from gpu_worker.runner.places import Places
from gpu_worker.runner.prompts.base import Prompt
from gpu_worker.runner.prompts.in_progress import AnyPass, Prefills
from gpu_worker.runner.quantum_times import QuantumTimes
from gpu_worker.runner.steps.decode import DecodeStep
from gpu_worker.runner.steps.drawing import FirstTokens, Sampling
from gpu_worker.runner.steps.step_queue import StepQueue
from gpu_worker.runner.totals import Totals
from gpu_worker.sampling import Sampler
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool
from gpu_worker.store.kv_meter import Fallback
from gpu_worker.store.link import TrainedLayer
from gpu_worker.store.offload import Offloader

in_step = torch.inference_mode()


class LocalRunner:
    """A `Runner` over a model, slots and caches in this process. For one thread.

    sequences: the requests that wait or run, by id. Benchmarks, the warm-up and tests read its public parts.
    """

    def __init__(
        self,
        intake: Intake,
        pool: SlotPool,
        caches: CacheSet,
        offloader: Offloader,
        decode: DecodeStep,
        prefills: Prefills,
        device: torch.device,
        num_layer_heads: int,
    ) -> None:
        """num_layer_heads: KV heads of all layers."""
        self.pool = pool
        self.caches = caches
        self.offloader = offloader
        self.decode = decode
        self.prefills = prefills
        self.indexing = Indexing(caches.recall, offloader)
        self._places = Places(intake, caches, offloader)
        self.sequences = self._places.sequences
        self._sampling = Sampling(Sampler())
        self._first_tokens = FirstTokens(self._sampling)
        self._steps = StepQueue(decode, self._sampling, device)
        self._times = QuantumTimes(device)
        self._totals = Totals(num_layer_heads)
        # Prompts that are finished, which others may not find yet.
        self._finished: list[Sequence] = []
        # Trainings of sequences that are gone: the store frees what they read when they end.
        self._ending: list[TrainedLayer] = []

    @property
    def num_free_slots(self) -> int:
        return self.caches.num_free_slots

    @property
    def silent_seconds(self) -> float:
        return self.offloader.client.silent_seconds

    @property
    def is_store_reachable(self) -> bool:
        return self.offloader.link.is_reachable

    def enter(self, request: GenerationRequest) -> Entered:
        return self._places.enter(request)

    @in_step
    def admit(self, plan: Admit) -> Admitted:
        return self._places.admit(plan)

    @in_step
    def begin_prompts(self, request_ids: tuple[str, ...]) -> Outcome:
        sequences = [self.sequences[name] for name in request_ids]
        try:
            prefill = self.prefills.begin(sequences)
        except CapacityError as error:
            return Outcome(failed=[Failure(name, error) for name in request_ids])
        progress = [_progress(sequence, 0) for sequence in sequences if not sequence.was_preempted]
        return Outcome(events=[*progress], passes=[_pass_of(prefill)])

    @in_step
    def run_quantum(self, plan: RunQuantum) -> Outcome:
        prefill = self.prefills.numbered(plan.number)
        work, kind, begun = prefill.next_work, prefill.next_kind, self._times.begin()
        failed = prefill.advance(plan.waits) + self._first_tokens.draw_after(prefill)
        self._totals.num_computed += prefill.count_computed()
        taken = self.indexing.take_early(prefill.prompts)
        failed += taken.failed
        outcome = _failures(failed)
        outcome.short = [(one.sequence_id, error) for one, error in taken.short]
        outcome.events, prefill.events = prefill.events, []
        running = {prompt.sequence: prompt for prompt in prefill.prompts}
        outcome.events += [
            _progress(sequence, prompt.computed_tokens)
            for sequence, prompt in running.items()
            if not sequence.was_preempted
        ]
        done = {prompt.sequence for prompt in prefill.done}
        silent = {one for one, error in failed if isinstance(error, StoreSilent)} - done
        outcome.silent = [one.sequence_id for one in running if one in silent]
        outcome.served = [one.sequence_id for one in running if one not in silent]
        outcome.passes = [_pass_of(prefill)]
        if plan.is_timed and work and not outcome.silent:
            self._times.end(begun, work, kind)
        return outcome

    @in_step
    def finish_prompts(self, waits: bool) -> Outcome:
        done = [
            prompt for prompt in self.prefills.done if self._first_tokens.is_there(prompt.sequence, waits)
        ]
        passes = dict.fromkeys(self._finish(prompt) for prompt in done)
        tokens = [token for prompt in done for token in self._first_tokens.take(prompt.sequence)]
        outcome = self._taken(tokens)
        outcome.prefilled = [prompt.sequence.sequence_id for prompt in done]
        outcome.passes = [_pass_of(prefill) for prefill in passes]
        return outcome

    def _finish(self, prompt: Prompt) -> AnyPass:
        self.indexing.add(prompt.sequence, prompt.trained)
        self._finished.append(prompt.sequence)
        return self.prefills.finish(prompt)

    @in_step
    def keep_prompts(self) -> None:
        finished, self._finished = self._finished, []
        for sequence in finished:
            # Unless it has failed since.
            if sequence.is_prefilled:
                self.caches.prefilled(sequence)

    @in_step
    def load_indexes(self, waits: bool) -> Outcome:
        taken = self.indexing.take(waits)
        outcome = _failures(taken.failed)
        outcome.ready = [one.sequence_id for one in taken.ready]
        outcome.short = [(one.sequence_id, error) for one, error in taken.short]
        return outcome

    @in_step
    def retry_indexes(self, request_ids: tuple[str, ...]) -> None:
        for sequence in (found for name in request_ids if (found := self.sequences.get(name))):
            self.indexing.ask_again_for(sequence, self.indexing.trained_of(sequence))
            if (prefill := self.prefills.get(sequence)) is not None:
                for prompt in prefill.prompts:
                    self.indexing.ask_again_for(prompt.sequence, prompt.trained)

    @in_step
    def begin_step(self, plan: BeginStep) -> Outcome:
        sequences = [self.sequences[name] for name in plan.request_ids]
        # A sequence with a slow constraint delays no other, unless all are slow.
        sequences = [one for one in sequences if one.sampler.is_ready] or sequences
        if plan.after is None:
            step = self._steps.begin(sequences)
        elif (after := self._steps.begin_after(plan.after, sequences, self._has_arena)) is not None:
            step = after
        else:
            return Outcome()
        self.caches.recall.fetch_counts.copy(sequences)
        # Also where the store is silent: half of the step is done, and cannot be repeated.
        outcome = Outcome(failed=[Failure(one.sequence_id, error) for one, error in step.failed])
        outcome.step, outcome.has_run = step.number, step.has_run
        if step.drawn is not None:
            outcome.sampled = [one.sequence_id for one in step.drawn.sequences]
        if (result := step.result) is not None:
            for sequence, trained in result.indexing:
                self.indexing.add(sequence, trained)
            outcome.indexing = [one.sequence_id for one, _ in result.indexing]
            outcome.short = [(one.sequence_id, error) for one, error in result.short]
            outcome.crowded = [one.sequence_id for one in result.crowded]
            outcome.silent = [one.sequence_id for one in result.silent]
            outcome.served = [one.sequence_id for one in result.sequences]
            outcome.events = result.events
        return outcome

    @property
    def _has_arena(self) -> bool:
        return self.offloader.arena.view is not None

    def is_reached(self, step: int) -> bool:
        return self._steps.numbered(step).ended.is_reached

    @in_step
    def take_tokens(self, step: int) -> Outcome:
        drawn = self._steps.take(step)
        return self._taken(drawn.take() if drawn is not None else ())

    def _taken(self, events: Iterable[tuple[Sequence, TokenEvent | None]]) -> Outcome:
        outcome = Outcome()
        for sequence, event in events:
            name = sequence.sequence_id
            if event is None:
                outcome.failed.append(Failure(name, InvalidLogits(name)))
                continue
            try:
                sequence.take(event.token_id)
            except RequestError as error:
                outcome.failed.append(Failure(name, error))
                continue
            is_stop = event.token_id in sequence.sampler.end_token_ids
            outcome.tokens.append(Token(name, event, is_stop, sequence.reason_to_end))
        return outcome

    @in_step
    def end_step(self, step: int) -> float:
        return self._steps.end(step)

    def settle(self) -> list[Measured]:
        return self._times.settle()

    @in_step
    def release(self, plan: Release) -> Released:
        sequence = self.sequences[plan.request_id]
        runs, had_arena = sequence.seat >= 0, sequence.offloads
        self._take_counts()
        held_bytes = self.caches.held_bytes(sequence) if runs else (0, 0)
        usage = sequence.usage(*held_bytes)
        passes = self._free(sequence) if runs else ()
        match plan.then:
            case Then.END:
                del self.sequences[plan.request_id]
                self._totals.add(sequence, self.offloader.meter)
            case Then.PREEMPT:
                sequence.preempt()
            case Then.RECOMPUTE | Then.DISTRUST:
                sequence.trusts_prefixes &= plan.then is Then.RECOMPUTE
                sequence.begin_again()
                self.offloader.meter.fallbacks[Fallback.RECOMPUTE] += 1
        sequence.seat, sequence.is_prefilled = -1, False
        return Released(
            usage,
            runs and had_arena,
            bool(self._ending),
            sequence.num_prefill,
            sequence.trusts_prefixes,
            passes,
        )

    def _free(self, sequence: Sequence) -> tuple[Pass, ...]:
        """Free what a running sequence holds; returns the pass of its prompt, if that is in progress."""
        # Slabs that it writes to become others'.
        self._steps.wait_for(sequence)
        prefill = self.prefills.get(sequence)
        trained = [*self.indexing.remove(sequence), *self.prefills.cancel(sequence)]
        self._first_tokens.forget(sequence)
        self.caches.release(sequence)
        self.offloader.extents.release(sequence)
        # What was not begun never will be: by then another life of the sequence may have its name.
        self._ending += [each for each in trained if not each.future.cancel()]
        return () if prefill is None else (_pass_of(prefill),)

    @in_step
    def finds_room(self, plan: Leaving) -> bool:
        leaving = [self.sequences[name] for name in plan.leaving]
        has_slots = self.caches.fits_without(self.sequences[plan.request_id], leaving)
        return has_slots and sum(map(self.offloader.extents.own_bytes, leaving)) >= plan.missing_bytes

    @in_step
    def without_slots(self, request_ids: tuple[str, ...]) -> list[str]:
        return [name for name in request_ids if not self.caches.finds_slots(self.sequences[name])]

    @in_step
    def spread_slots(self) -> None:
        self.caches.spread()

    def holders(self) -> list[str]:
        return [one.sequence_id for one in self._places.offloading if one in self.offloader.extents]

    def is_freeing(self) -> bool:
        self._ending = [trained for trained in self._ending if not trained.future.done()]
        return bool(self._ending)

    def leave_arena(self, request_id: str) -> bool:
        sequence = self.sequences[request_id]
        if self.caches.needs_store_to_decode(sequence):
            return False
        self.offloader.extents.stop_offloading(sequence)
        return True

    def drop_copies(self) -> bool:
        try:
            return self.offloader.extents.drop_copies()
        except StoreUnavailable:
            return False

    def readers(self, missing_bytes: int) -> list[str]:
        known = {one: self.offloader.extents.known_bytes(one) for one in self.prefills}
        if sum(known.values()) < missing_bytes:
            return []
        return [one.sequence_id for one, num_bytes in known.items() if num_bytes]

    def renew_store(self) -> tuple[str, ...]:
        return self._places.lost() if self.offloader.extents.renew() else ()

    def _take_counts(self, wait: bool = True) -> None:
        self.caches.recall.fetch_counts.take(self._places.offloading, wait)

    def stats(self) -> RunnerStats:
        self._take_counts(wait=False)
        return self._totals.stats(self.prefills, self.pool, self.offloader, self._sampling.num_forced)

    def reset_counts(self) -> None:
        self._totals.clear()
        self._sampling.num_forced = 0
        self.offloader.reset_counts()

    def close(self) -> None:
        self.offloader.close()


def _progress(sequence: Sequence, computed_tokens: int) -> tuple[str, ProgressEvent]:
    return sequence.sequence_id, ProgressEvent(computed_tokens, sequence.num_cached)


def _pass_of(prefill: AnyPass) -> Pass:
    shares = {prompt.sequence.sequence_id: prompt.share for prompt in prefill.prompts}
    is_computed, is_copying = prefill.is_computed, prefill.is_copying
    return Pass(prefill.number, shares, prefill.next_work, prefill.next_kind, is_computed, is_copying)


def _failures(failed: Iterable[tuple[Sequence, WorkerError]]) -> Outcome:
    """An outcome with these, but for those that only wait for a silent store."""
    return Outcome(
        failed=[
            Failure(one.sequence_id, error) for one, error in failed if not isinstance(error, StoreSilent)
        ]
    )
