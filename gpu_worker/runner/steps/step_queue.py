"""The decode steps that the device is at, in their order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.errors import StoreUnavailable, WorkerError, no_room
from gpu_worker.runner.steps.decode import DecodeStep, StepResult
from gpu_worker.runner.steps.drawing import Drawn, Sampling
from gpu_worker.state.lane_inputs import drawn_at
from gpu_worker.state.sequence import Sequence


@dataclass(slots=True, eq=False)
class Decoding:
    """A decode step between two marks. sequences: of the step. drawn: its tokens on their way; None: there are none, or
    they were taken. result: what the step gave; None: it could not be queued whole. failed: with their errors."""

    number: int
    begun: Mark
    ended: Mark
    sequences: list[Sequence]
    drawn: Drawn | None = None
    result: StepResult | None = None
    failed: list[tuple[Sequence, WorkerError]] = field(default_factory=list)

    @property
    def has_run(self) -> bool:
        """Return whether any sequence took part."""
        return self.result is None or bool(self.result.sequences or self.result.failed)


class StepQueue:
    """Queues steps, and gives their tokens once they are there."""

    def __init__(self, decode: DecodeStep, sampling: Sampling, device: torch.device) -> None:
        self._decode = decode
        self._sampling = sampling
        self._device = device
        self._steps = deque[Decoding]()
        self._num_queued = 0

    def numbered(self, number: int) -> Decoding:
        """Return a step that is not over."""
        return next(step for step in self._steps if step.number == number)

    def begin(self, sequences: list[Sequence]) -> Decoding:
        """Queue a step of sequences with known tokens."""
        return self._queue(sequences, None)

    def begin_after(self, number: int, sequences: list[Sequence], has_arena: bool) -> Decoding | None:
        """Queue the step after this one from its tokens on the device; None where the host takes part in what follows.
        has_arena: whether the device writes to the store's arena itself."""
        drawn = self.numbered(number).drawn
        if drawn is None or not all(_needs_no_host(one, has_arena) for one in sequences):
            return None
        places = {sequence: place for place, sequence in enumerate(drawn.sequences)}
        for sequence in sequences:
            sequence.next_token = drawn_at(places[sequence])
        return self._queue(sequences, drawn.choice.token_ids)

    def take(self, number: int) -> Drawn | None:
        """Take a step's tokens, which may be on their way; None: there are none, or they were taken."""
        step = self.numbered(number)
        drawn, step.drawn = step.drawn, None
        return drawn

    def end(self, number: int) -> float:
        """Wait for a step's end; returns its seconds."""
        step = self.numbered(number)
        # Where all tokens were forced none was waited for.
        step.ended.wait()
        self._steps.remove(step)
        return step.ended.seconds_since(step.begun)

    def wait_for(self, sequence: Sequence) -> None:
        """Wait until no step writes to what the sequence has."""
        for step in self._steps:
            if sequence in step.sequences:
                step.ended.wait()

    def _queue(self, sequences: list[Sequence], drawn: Tensor | None) -> Decoding:
        """drawn: tokens of the step before, which the host does not have yet."""
        begun = Mark(self._device)
        failed: list[tuple[Sequence, WorkerError]] = []
        result: StepResult | None = None
        try:
            result = self._decode.run(sequences, drawn)
        except StoreUnavailable as error:
            # A sequence that recalls, or has a slot for its new token already, cannot repeat the step.
            failed = [(one, error) for one in sequences if one.offloads or one.is_compressed]
        except torch.OutOfMemoryError as error:
            failed = [(one, no_room("the step", error)) for one in sequences]
        ended = Mark(self._device)
        step = Decoding(self._num_queued, begun, ended, sequences, None, result, failed)
        self._num_queued += 1
        self._steps.append(step)
        if result is None:
            # Half of it may be queued.
            ended.wait()
            return step
        step.failed += result.failed
        try:
            step.drawn = self._sampling.draw(result.sequences, result.logits, 0 if drawn is None else 1)
        except torch.OutOfMemoryError as error:
            step.failed += [(one, no_room("the step", error)) for one in result.sequences]
        return step


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
