"""Carrel's prefill: real prompts of random tokens."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace

import torch

from benchmarks.device import limited, peak_bytes
from benchmarks.errors import NotMeasurable
from benchmarks.figures import PrefillCase, PrefillFigures, Spread
from benchmarks.rivals.bare_engine import (
    PREFILL_CHUNK,
    budget_of,
    dummy_model,
    name_of,
    policies_for,
    request_of,
    running_engine,
)
from benchmarks.rivals.engine_slots import House
from benchmarks.shapes import ModelShape
from gpu_worker.engine.engine import Engine
from gpu_worker.records import ErrorEvent, Event, IndexDevice, TokenEvent

NUM_NEW_TOKENS = 4
# A warm-up's budget of its prompt, at most: the policy must have something to do in it.
WARM_UP_SHARE = 4
# Tokens by which each prompt is shorter than the one before it.
SHORTER = 3


class CarrelPrefill:
    """From submission to the first and to the second token."""

    def __init__(self, shape: ModelShape, device: torch.device, index_device: str = "auto") -> None:
        self._shape, self._device = shape, device
        self._index_device = IndexDevice(index_device)
        self._model = dummy_model(shape, device)

    def measure(self, case: PrefillCase) -> PrefillFigures:
        with limited(self._device, case.gpu_memory_limit):
            return self._prefill(case)

    def _prefill(self, case: PrefillCase) -> PrefillFigures:
        policies = policies_for(case)
        house = House(
            self._model,
            policies[name_of(case)],
            budget_of(case),
            1,
            case.context,
            case.context + 16,
            PREFILL_CHUNK,
        )
        with running_engine(
            house,
            policies,
            limit=case.gpu_memory_limit,
            index_device=self._index_device,
            num_trainers=max(1, len(os.sched_getaffinity(0)) - 2),
        ) as worker:
            self._answer(worker.engine, _warm_up(case), 0)
            times = [self._answer(worker.engine, case, number) for number in range(1, case.repeats + 1)]
            first, second = (Spread.of(each) for each in zip(*times, strict=True))
            return PrefillFigures(first, second, peak_bytes(self._device))

    def _answer(self, engine: Engine, case: PrefillCase, number: int) -> tuple[float, float]:
        """The milliseconds to the first and second token of one prompt.

        Raises NotMeasurable when the engine refuses it.
        """
        rng = random.Random(number)
        # Hardly any prompt of a server is as long as an earlier one: what is planned or compiled for a length counts.
        num_tokens = max(1, case.context - SHORTER * number)
        prompt = tuple(rng.randrange(self._shape.vocab_size) for _ in range(num_tokens))
        at: list[float] = []
        failures: list[Exception] = []

        def note(event: Event) -> None:
            if isinstance(event, TokenEvent):
                at.append(time.perf_counter())
            elif isinstance(event, ErrorEvent):
                failures.append(event.error)

        begun = time.perf_counter()
        engine.submit(request_of(case, number, prompt, NUM_NEW_TOKENS), note)
        while engine.has_work:
            engine.step()
        if failures:
            raise NotMeasurable(str(failures[0]))
        return 1e3 * (at[0] - begun), 1e3 * (at[1] - begun)


def _warm_up(case: PrefillCase) -> PrefillCase:
    """A shorter prompt for kernels and memory, of which the policy keeps or selects a part too."""
    context = min(case.context, 2 * PREFILL_CHUNK + 1)
    budget = case.budget_tokens and min(case.budget_tokens, max(2, context // WARM_UP_SHARE))
    return replace(case, context=context, budget_tokens=budget)
