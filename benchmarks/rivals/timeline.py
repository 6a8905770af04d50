"""When a prompt's indexes were asked for and when they were there, beside its first and second token."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import IndexSpan
from gpu_worker.engine.prompts.prefill import Prefill
from gpu_worker.errors import WorkerError
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.trainings import TrainedLayer


@dataclass(slots=True)
class _Asked:
    trained: TrainedLayer
    asked: float
    ready: float | None = None

    def span(self, begun: float) -> IndexSpan:
        segment = self.trained.future.result(0)
        assert self.ready is not None
        asked_ms, ready_ms = (1e3 * (when - begun) for when in (self.asked, self.ready))
        core_ms = 1e3 * segment.training_seconds
        return IndexSpan(self.trained.layer, asked_ms, ready_ms, core_ms, segment.iterations)


class Timeline:
    """Notes the indexes of one prompt at a time, as a worker learns of them: `make_prefill` of an engine."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []
        # Answers come in threads of their own.
        self._lock = threading.Lock()

    def make_prefill(self, *arguments: Any) -> Prefill:
        """With the arguments of `Prefill`."""
        return WatchedPrefill(self, *arguments)

    def note(self, trained: TrainedLayer) -> None:
        """An index was asked for now."""
        asked = _Asked(trained, time.perf_counter())
        with self._lock:
            self._asked.append(asked)
        trained.future.add_done_callback(lambda _: self._finish(asked))

    def take(self, begun: float) -> tuple[IndexSpan, ...]:
        """Those that were answered since it was last asked, in milliseconds after `begun`, and forget all."""
        with self._lock:
            asked, self._asked = self._asked, []
            return tuple(one.span(begun) for one in asked if one.ready is not None)

    def _finish(self, asked: _Asked) -> None:
        with self._lock:
            asked.ready = time.perf_counter()


class WatchedPrefill(Prefill):
    """Tells a timeline of every index that was asked for in a quantum."""

    def __init__(self, timeline: Timeline, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._timeline = timeline
        self._last_told = -1

    def advance(self, wait: bool = True) -> list[tuple[Sequence, WorkerError]]:
        failed = super().advance(wait)
        for prompt in self.prompts:
            for trained in prompt.trained:
                if trained.layer > self._last_told:
                    self._timeline.note(trained)
                    self._last_told = trained.layer
        return failed
