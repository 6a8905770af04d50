"""Policy time: what a policy does with each prefilled layer, timed where it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.policies.base import CacheShape, Family, Plan, Policy
from gpu_worker.policies.recall import Candidates, IndexJob, PrefilledLayer, RecallPolicy, TrainedSegment
from gpu_worker.policies.retain import LayerRows, Retained, RetainPolicy
from gpu_worker.policies.wrapper import AllocationPolicy, delegating


class WorkClock:
    """Sums spans of a device's work: on a GPU between events, what the host makes it wait for included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Mark, Mark]] = []

    def mark(self) -> Mark:
        return Mark(self._device)

    def add_since(self, begin: Mark) -> None:
        self._spans.append((begin, self.mark()))

    @contextmanager
    def timing(self) -> Iterator[None]:
        begin = self.mark()
        yield
        self.add_since(begin)

    def take_ms(self) -> float:
        """The sum since it was last taken; waits for the device."""
        spans, self._spans = self._spans, []
        for _, end in spans:
            end.wait()
        return 1e3 * sum(end.seconds_since(begin) for begin, end in spans)


def timed(policy: Policy, clock: WorkClock, trains_indexes: bool) -> Policy:
    """The policy, with its work on a prefilled layer timed. trains_indexes: on the model's device."""
    if policy.family is Family.RETAIN:
        return TimedRetain(cast(RetainPolicy, policy), clock)
    if policy.family is Family.RECALL:
        return TimedRecall(cast(RecallPolicy, policy), clock, trains_indexes)
    return policy


@dataclass(frozen=True, slots=True, eq=False)
class TimedRetain(AllocationPolicy):
    """Times `compress`."""

    inner: RetainPolicy
    clock: WorkClock

    @property
    def name(self) -> str:
        return self.inner.name

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        with self.clock.timing():
            return self.inner.compress(rows, plan, budget)


@dataclass(frozen=True, slots=True, eq=False)
@delegating
class TimedRecall(RecallPolicy[Any]):
    """Times `observe_prefill`; and, where indexes are trained on the device, from the question what is to be trained
    until it is loaded, between which the engine trains and does nothing else."""

    inner: RecallPolicy[Any]
    clock: WorkClock
    trains_indexes: bool
    asked: list[Mark] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        return self.inner.plan(num_prompt_tokens, budget_tokens)

    def allocate(self, shape: CacheShape) -> Any:
        return self.inner.allocate(shape)

    def score(self, index: Any, candidates: Candidates) -> Tensor:
        return self.inner.score(index, candidates)

    def prompt_job(self, plan: Plan, begin: int, end: int) -> IndexJob | None:
        job = self.inner.prompt_job(plan, begin, end)
        if job is not None and self.trains_indexes:
            self.asked[:] = [self.clock.mark()]
        return job

    def observe_prefill(self, index: Any, prefilled: PrefilledLayer) -> None:
        with self.clock.timing():
            self.inner.observe_prefill(index, prefilled)

    def load(self, index: Any, trained: TrainedSegment) -> None:
        self.inner.load(index, trained)
        if self.asked:
            self.clock.add_since(self.asked.pop())
