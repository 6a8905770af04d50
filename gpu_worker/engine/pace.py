"""Decides how long an iteration may take and how much of it prompts get, by what steps and quanta took so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from gpu_worker.engine.prompt_room import PromptRoom
from gpu_worker.engine.prompt_work import prompt_work
from gpu_worker.engine.request import Request
from gpu_worker.records.plans import Measured, WorkKind

if TYPE_CHECKING:
    # it imports PyTorch
    from gpu_worker.models import ModelConfig

# Between the tokens of a stream, where no target is given: the larger of this and so many decode steps.
ITL_SECONDS = 0.025
ITL_STEPS = 2.5
# Samples of the last work; their median leaves out what was compiled on the way.
NUM_SAMPLES = 15


class _Recent:
    """The median of the last samples; None before the first. It is read far more often than it changes."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=NUM_SAMPLES)
        self.median: float | None = None

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)
        self.median = median(self._samples)


class Pace:
    """Predicts decode steps and prefill work, and says what fits an iteration.

    An iteration is one decode step and then prompts until its time is up, which is what a stream waits between two
    tokens. Where no request decodes prompts have all of it; it still ends, so that arrivals are looked at.
    """

    def __init__(self, itl_seconds: float | None = None) -> None:
        """itl_seconds: the target between two tokens of a stream; None: what ITL_SECONDS and ITL_STEPS say."""
        self._itl_seconds = itl_seconds
        self._step_seconds = _Recent()
        # Seconds of an operation.
        self._work_seconds = {kind: _Recent() for kind in WorkKind}

    @property
    def iteration_seconds(self) -> float:
        return self._itl_seconds or max(ITL_SECONDS, ITL_STEPS * self._step)

    def prefill_seconds(self, is_decoding: bool) -> float:
        """Return an iteration's seconds for prompts; below 0 where steps alone take longer than the target."""
        return self.iteration_seconds - (self._step if is_decoding else 0.0)

    def seconds(self, work: float, kind: WorkKind) -> float | None:
        """Return what so many operations of prefill take; None before any was measured that tells."""
        measured = self._work_seconds[kind].median
        if measured is None and kind is not WorkKind.SCORED:
            other = WorkKind.LONG if kind is WorkKind.SHORT else WorkKind.SHORT
            measured = self._work_seconds[other].median
        return None if measured is None else work * measured

    @property
    def _step(self) -> float:
        return self._step_seconds.median or 0.0

    def decoded(self, seconds: float) -> None:
        """Count a decode step."""
        self._step_seconds.add(seconds)

    def prefilled(self, measured: Iterable[Measured]) -> None:
        """Count prefill work."""
        for one in measured:
            self._work_seconds[one.kind].add(one.seconds / one.work)


class PromptSeconds:
    """Predicts the seconds that a prompt takes alone, without its known part; 0 while nothing was measured."""

    def __init__(self, pace: Pace, config: ModelConfig, room: PromptRoom) -> None:
        self._pace = pace
        self._config = config
        self._room = room

    def __call__(self, request: Request) -> float:
        num_known = request.num_known
        work = prompt_work(self._config, num_known, request.num_prefill)
        is_short = self._room.is_short(request.num_prefill - num_known)
        return self._pace.seconds(work, WorkKind.SHORT if is_short else WorkKind.LONG) or 0.0
