"""The decode steps that the device is at, and the one that it comes to next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.engine.admission.preemption import Patience
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import ArenaFull, StoreUnavailable, WorkerError, no_room
from gpu_worker.records import EngineStats, FinishReason
from gpu_worker.runner.indexing import Indexing
from gpu_worker.runner.steps.decode import DecodeStep
from gpu_worker.runner.steps.drawing import Drawn, draw
from gpu_worker.sampling import Sampler
from gpu_worker.state.lane_inputs import drawn_at
from gpu_worker.state.sequence import Sequence, Status
from gpu_worker.store.offload import Offloader


class End(NamedTuple):
    """The end of an answer. stop_token_id: the token that ended it, if one did."""

    sequence: Sequence
    reason: FinishReason
    stop_token_id: int | None


@dataclass(slots=True, eq=False)
class Decoding:
    """A decode step of some sequences between two marks. has_run: whether anybody took part. short: those for which the
    arena had no room; crowded: those for which there were no slots. drawn: its tokens on their way; None: there are
    none, or they were taken. is_over: its end was waited for."""

    begun: Mark
    ended: Mark
    sequences: list[Sequence] = field(default_factory=list)
    has_run: bool = True
    short: list[tuple[Sequence, ArenaFull]] = field(default_factory=list)
    crowded: list[Sequence] = field(default_factory=list)
    drawn: Drawn | None = None
    is_over: bool = False


class StepQueue:
    """Begins steps, in their order; who takes their tokens ends them."""

    def __init__(
        self,
        decode: DecodeStep,
        scheduler: Scheduler,
        offloader: Offloader,
        indexing: Indexing,
        patience: Patience,
        sampler: Sampler,
        mark: Callable[[], Mark],
        copy_counts: Callable[[list[Sequence]], None],
        fail: Callable[[list[Sequence], WorkerError], None],
    ) -> None:
        """mark: makes one of now, in the device's work. copy_counts: of the rows that a step of these fetched. fail:
        ends the sequences of a step that could not be queued whole."""
        self._decode = decode
        self._scheduler = scheduler
        self._offloader = offloader
        self._indexing = indexing
        self._patience = patience
        self._sampler = sampler
        self._mark = mark
        self._copy_counts = copy_counts
        self._fail = fail
        self._steps = deque[Decoding]()

    def __iter__(self) -> Iterator[Decoding]:
        """The oldest first."""
        return iter(tuple(self._steps))

    @property
    def oldest(self) -> Decoding | None:
        return self._steps[0] if self._steps else None

    def is_last(self, step: Decoding) -> bool:
        """Whether none is queued behind it."""
        return not self._steps or self._steps[-1] is step

    def end(self, step: Decoding) -> None:
        """Its tokens are taken, and it is over."""
        if step in self._steps:
            self._steps.remove(step)

    def wait_for(self, sequence: Sequence) -> None:
        """Until no step writes to what the sequence has."""
        for step in self._steps:
            if sequence in step.sequences:
                step.ended.wait()

    def begin(self, stats: EngineStats) -> Decoding | None:
        """A step of all that decode, whose tokens are known; None where nobody does."""
        sequences = self._scheduler.decoding()
        return self._queue(sequences, stats) if sequences else None

    def begin_next(self, step: Decoding, stats: EngineStats) -> None:
        """Queue the step after this one, whose tokens are not known yet, where that is possible."""
        sequences = followers(step, self._scheduler, self._offloader.arena is not None)
        if step.drawn is None or not sequences:
            return
        places = {sequence: place for place, sequence in enumerate(step.drawn.sequences)}
        for sequence in sequences:
            sequence.next_token = drawn_at(places[sequence])
        self._queue(sequences, stats, step.drawn.choice.token_ids)

    def _queue(self, sequences: list[Sequence], stats: EngineStats, drawn: Tensor | None = None) -> Decoding:
        """drawn: tokens of the step before, which the host does not have yet."""
        begun = self._mark()
        try:
            result = self._decode.run(sequences, drawn)
        except StoreUnavailable as error:
            # Who recalls, or whose new token has a slot already, cannot repeat the step.
            self._fail([one for one in sequences if one.offloads or one.is_compressed], error)
            return Decoding(begun, self._mark())
        except torch.OutOfMemoryError as error:
            self._fail(sequences, no_room("the step", error))
            return Decoding(begun, self._mark())
        finally:
            self._copy_counts(sequences)
        has_run = bool(result.sequences or result.failed)
        step = Decoding(begun, self._mark(), sequences, has_run, result.short, result.crowded)
        self._steps.append(step)
        for sequence, failure in result.failed:
            self._fail([sequence], failure)
        for sequence, trained in result.indexing:
            self._indexing.add(sequence, trained)
        self._patience.note(result.silent, result.sequences)
        try:
            num_coming = 0 if drawn is None else 1
            step.drawn = draw(self._sampler, result.sequences, result.logits, stats, num_coming)
        except torch.OutOfMemoryError as error:
            self._fail(result.sequences, no_room("the step", error))
        return step


def followers(decoding: Decoding, scheduler: Scheduler, has_arena: bool) -> list[Sequence]:
    """The sequences of the step after `decoding`; none where it has to wait, for a prompt or for the host's part in it.

    Between two steps the device would wait for the host: until it has the tokens, has looked whether an answer ends
    with one, and has queued the next step. A step's tokens are where the next one reads them, on the device; so the
    next one is queued behind it, of those whose answers go on as far as the host knows. One that turns out to have
    ended takes part in vain: nothing of that step is told. has_arena: whether the device writes to the store's arena
    itself."""
    # Also where something is left to do for one that took no part.
    if decoding.drawn is None or len(decoding.drawn.sequences) < len(decoding.sequences):
        return []
    running = [one for one in decoding.sequences if one.status is Status.DECODE]
    if scheduler.num_waiting or scheduler.num_running != len(running):
        return []
    if not all(_needs_no_host(one, has_arena) for one in running):
        return []
    return [one for one in running if one.num_output + 1 < one.max_tokens]


def _needs_no_host(sequence: Sequence, has_arena: bool) -> bool:
    """Return whether the host knows all that a step needs before the previous step's token."""
    request, sampler = sequence.request, sequence.sampler
    return (
        sampler.is_free
        and not sequence.forced
        and not (request.measure or request.attention)
        and not sequence.can_miss
        and (has_arena or not sequence.offloads)
    )
