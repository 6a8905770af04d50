"""Carrel's prefill: real prompts of random tokens, and the policy time within them."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field, replace

import torch

from benchmarks.device import limited, peak_bytes
from benchmarks.errors import NotMeasurable
from benchmarks.figures import IndexSpan, PrefillCase, PrefillFigures, Spread
from benchmarks.rivals.bare_engine import (
    PREFILL_CHUNK,
    budget_of,
    dummy_model,
    name_of,
    policies_for,
    request_of,
    running_engine,
)
from benchmarks.rivals.decode_base import PrefillRival
from benchmarks.rivals.engine_slots import House
from benchmarks.rivals.own_work import WorkClock, timed
from benchmarks.rivals.timeline import Timeline
from benchmarks.shapes import ModelShape
from gpu_worker.engine.engine import Engine
from gpu_worker.policies.base import Family
from gpu_worker.records import ErrorEvent, Event, IndexDevice, TokenEvent

NUM_NEW_TOKENS = 4
# A warm-up's budget of its prompt, at most: the policy must have something to do in it.
WARM_UP_SHARE = 4
# Tokens by which each prompt is shorter than the one before it.
SHORTER = 3


def prefill(shape: ModelShape, device: torch.device) -> PrefillRival:
    return CarrelPrefill(shape, device, IndexDevice.AUTO)


def prefill_training_on_gpu(shape: ModelShape, device: torch.device) -> PrefillRival:
    return CarrelPrefill(shape, device, IndexDevice.GPU)


def prefill_training_in_store(shape: ModelShape, device: torch.device) -> PrefillRival:
    return CarrelPrefill(shape, device, IndexDevice.CPU)


@dataclass
class _Times:
    """Milliseconds of each prompt: to its first and to its second token, and its policy time until the first;
    and the indexes of the last."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    indexes: tuple[IndexSpan, ...] = ()


@dataclass(frozen=True)
class _Watch:
    """Observers of a prompt."""

    clock: WorkClock
    timeline: Timeline


class CarrelPrefill(PrefillRival):
    """From submission to the first and to the second token."""

    def __init__(self, shape: ModelShape, device: torch.device, index_device: IndexDevice) -> None:
        self._shape, self._device = shape, device
        self._index_device = index_device
        self._model = dummy_model(shape, device)

    def measure(self, case: PrefillCase) -> PrefillFigures:
        with limited(self._device, case.gpu_memory_limit):
            return self._prefill(case)

    def _prefill(self, case: PrefillCase) -> PrefillFigures:
        clock = WorkClock(self._device)
        found = policies_for(case)
        policies = {
            name: timed(one, clock, self._index_device is IndexDevice.GPU) for name, one in found.items()
        }
        policy = policies[name_of(case)]
        capacity = case.context + 16
        house = House(self._model, policy, budget_of(case), 1, case.context, capacity, PREFILL_CHUNK)
        times, timeline = _Times(), Timeline()
        with running_engine(
            house,
            policies,
            timeline.make_prefill,
            limit=case.gpu_memory_limit,
            index_device=self._index_device,
            num_trainers=max(1, len(os.sched_getaffinity(0)) - 2),
        ) as engine:
            watch = _Watch(clock, timeline)
            self._answer(engine, _warm_up(case), 0, watch, _Times())
            for number in range(1, case.repeats + 1):
                self._answer(engine, case, number, watch, times)
            has_own = policy.family is not Family.DENSE
            shares = [own / first for own, first in zip(times.own, times.first, strict=True)]
            return PrefillFigures(
                Spread.of(times.first),
                Spread.of(times.second),
                peak_bytes(self._device),
                own_ms=Spread.of(times.own) if has_own else None,
                own_share=Spread.of(shares) if has_own else None,
                indexes=times.indexes,
                last_ms=(times.first[-1], times.second[-1]),
            )

    def _answer(self, engine: Engine, case: PrefillCase, number: int, watch: _Watch, times: _Times) -> None:
        """One prompt. Raises NotMeasurable when the engine refuses it."""
        rng = random.Random(number)
        # Hardly any prompt of a server is as long as an earlier one: what is planned or compiled for a length counts.
        num_tokens = max(1, case.context - SHORTER * number)
        prompt = tuple(rng.randrange(self._shape.vocab_size) for _ in range(num_tokens))
        at: list[float] = []
        failures: list[Exception] = []

        def note(event: Event) -> None:
            if isinstance(event, TokenEvent):
                at.append(time.perf_counter())
                if len(at) == 1:
                    # The first token is known, so that all before it is done: this waits for nothing.
                    times.own.append(watch.clock.take_ms())
            elif isinstance(event, ErrorEvent):
                failures.append(event.error)

        begun = time.perf_counter()
        engine.submit(request_of(case, number, prompt, NUM_NEW_TOKENS), note)
        while engine.has_work:
            engine.step()
        if failures:
            raise NotMeasurable(str(failures[0]))
        times.first.append(1e3 * (at[0] - begun))
        times.second.append(1e3 * (at[1] - begun))
        times.indexes = watch.timeline.take(begun)


def _warm_up(case: PrefillCase) -> PrefillCase:
    """A shorter prompt for kernels and memory, of which the policy keeps or selects a part too."""
    context = min(case.context, 2 * PREFILL_CHUNK + 1)
    budget = case.budget_tokens and min(case.budget_tokens, max(2, context // WARM_UP_SHARE))
    return replace(case, context=context, budget_tokens=budget)
