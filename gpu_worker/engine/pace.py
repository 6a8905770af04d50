"""How long an iteration may take, and how much of it prompts get: by what steps and quanta took so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from gpu_worker.device import Mark
from gpu_worker.models import ModelConfig
from gpu_worker.runner.prompts.base import WorkKind, prompt_work
from gpu_worker.runner.prompts.prompt_memory import PromptRoom
from gpu_worker.state.sequence import Sequence, Status

# Between the tokens of a stream, where no target is given: the larger of this and so many decode steps.
ITL_SECONDS = 0.025
ITL_STEPS = 2.5
# Of what was measured last; the median leaves out what was compiled on the way.
NUM_SAMPLES = 15


class Span(NamedTuple):
    """A quantum between two marks."""

    begun: Mark
    ended: Mark
    work: float
    kind: WorkKind


class _Recent:
    """The median of what was measured last; None before anything was. It is read far more often than it changes."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=NUM_SAMPLES)
        self.median: float | None = None

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)
        self.median = median(self._samples)


class Pace:
    """Measures decode steps and prefill work, and says what fits an iteration.

    An iteration is one decode step and then prompts until its time is up, which is what a stream waits between two
    tokens. Where nobody decodes prompts have all of it; it still ends, so that who arrives is looked at.
    """

    def __init__(self, mark: Callable[[], Mark], itl_seconds: float | None = None) -> None:
        """mark: makes one of now, in the device's work. itl_seconds: the target between two tokens of a stream; None:
        what ITL_SECONDS and ITL_STEPS say."""
        self.mark = mark
        self._itl_seconds = itl_seconds
        self._step_seconds = _Recent()
        # Of an operation.
        self._work_seconds = {kind: _Recent() for kind in WorkKind}
        # Of one iteration each.
        self._queued: deque[list[Span]] = deque()

    @property
    def iteration_seconds(self) -> float:
        return self._itl_seconds or max(ITL_SECONDS, ITL_STEPS * self._step)

    def prefill_seconds(self, is_decoding: bool) -> float:
        """Of an iteration, for prompts; may be below 0 where steps alone take longer than the target."""
        return self.iteration_seconds - (self._step if is_decoding else 0.0)

    def seconds(self, work: float, kind: WorkKind) -> float | None:
        """What so many operations of prefill take; None before any was measured that tells."""
        measured = self._work_seconds[kind].median
        if measured is None and kind is not WorkKind.SCORED:
            other = WorkKind.LONG if kind is WorkKind.SHORT else WorkKind.SHORT
            measured = self._work_seconds[other].median
        return None if measured is None else work * measured

    @property
    def _step(self) -> float:
        return self._step_seconds.median or 0.0

    def decoded(self, begun: Mark, ended: Mark) -> None:
        """A decode step lay between two marks, which are reached."""
        self._step_seconds.add(ended.seconds_since(begun))

    def prefilled(self, spans: list[Span]) -> None:
        """An iteration's quanta are queued."""
        if spans:
            self._queued.append(spans)

    def settle(self) -> None:
        """Measure what is done. Waits until the device has no more than one iteration's prompts before it: what
        arrives would wait behind all that is queued."""
        while self._queued and (len(self._queued) > 1 or self._queued[0][-1].ended.is_reached):
            done = self._queued.popleft()
            done[-1].ended.wait()
            for span in done:
                self._work_seconds[span.kind].add(span.ended.seconds_since(span.begun) / span.work)


class PromptSeconds:
    """What prompts take alone, but for what is cached; 0 while nothing was measured."""

    def __init__(self, pace: Pace, config: ModelConfig, room: PromptRoom) -> None:
        self._pace = pace
        self._config = config
        self._room = room

    def __call__(self, sequence: Sequence) -> float:
        is_waiting = sequence.status is Status.WAITING
        num_known = sequence.num_expected if is_waiting else sequence.num_cached
        work = prompt_work(self._config, num_known, sequence.num_prefill)
        is_short = self._room.is_short(sequence.num_prefill - num_known)
        return self._pace.seconds(work, WorkKind.SHORT if is_short else WorkKind.LONG) or 0.0
