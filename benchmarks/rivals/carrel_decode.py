"""Carrel's decode step over caches that are filled at random."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import torch

from benchmarks.device import default_dtype, limited, peak_bytes, release
from benchmarks.errors import NotMeasurable
from benchmarks.figures import DecodeCase, DecodeFigures, Spread
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
from benchmarks.rivals.replayed import Replayed
from benchmarks.shapes import ModelShape
from benchmarks.timing import WARM_UP_STEPS, kernel_times, step_times, write_trace
from gpu_worker.engine.request import Status
from gpu_worker.models import LoadedModel
from gpu_worker.policies.base import Family, Policy
from gpu_worker.policies.retain import RetainPolicy
from gpu_worker.records import ErrorEvent, Event, IndexDevice
from gpu_worker.row_format import row_format
from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.startup.assemble import Assembled
from gpu_worker.state.sequence import Sequence


class SyntheticPrefill(Prefill):
    """Random rows go where computed ones would: slots, arena, index, compression. All buffers are filled once."""

    def _run_quantum(self, wait: bool) -> None:
        for drawn in (*self._buffers, *(prompt.queries for prompt in self.prompts)):
            drawn.normal_()
        while not self._is_computed:
            self._finish_layer()
            self._settle()
        while not self.is_done:
            for prompt in self.prompts:
                prompt.wait()
            self._settle()


# A policy that compresses again more rarely than this is not waited for: spread over so many steps it costs nothing.
LONGEST_INTERVAL = 512


class CarrelDecode:
    """Caches and arena are filled at random, compressed or indexed by the policy; then whole engine steps are timed.

    Without a memory limit every sequence has a slot for each token that it attends, and nothing goes to the store.
    Under one, sequences that recall share the slots that the engine's memory plan leaves.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._models: dict[str | None, LoadedModel] = {}

    def model(self, quantization: str | None) -> LoadedModel:
        """The model with weights in this form; one at a time."""
        if quantization not in self._models:
            self._models.clear()
            release(self._device)
            self._models[quantization] = dummy_model(self._shape, self._device, quantization)
        return self._models[quantization]

    def measure(self, case: DecodeCase) -> DecodeFigures:
        with limited(self._device, case.gpu_memory_limit):
            return self._decode(case)

    def _decode(self, case: DecodeCase) -> DecodeFigures:
        replayed = Replayed(case, self._shape, self._device) if case.hit_rate is not None else None
        policies = policies_for(case, replayed.policy) if replayed else policies_for(case)
        policy = policies[name_of(case)]
        interval = _interval(policy, case)
        num_steps = -(-case.steps // interval) * interval
        # The second time round, every shape of step that comes in an interval is captured.
        num_warm = 2 * interval if interval > 1 else WARM_UP_STEPS
        # The first in decodes while the others' prompts are filled in.
        capacity = case.context + num_warm + num_steps + WARM_UP_STEPS + 3 * case.batch + 16
        house = House(
            self.model(case.quantization),
            policy,
            budget_of(case),
            case.batch,
            case.context,
            capacity,
            PREFILL_CHUNK,
        )
        with running_engine(
            house,
            policies,
            SyntheticPrefill,
            limit=case.gpu_memory_limit,
            index_device=IndexDevice.GPU,
            stores_rows=case.gpu_memory_limit is not None,
        ) as worker:
            engine = worker.engine
            running = self._fill(worker, case, capacity - case.context)
            before = replayed.prepare(running) if replayed else None
            for index in range(num_warm):
                if before:
                    before(index)
                engine.step()
            begun = engine.stats().fetched_bytes_total
            num_missed = sum(one.meter.missed_rows for one in running)
            num_selected = sum(one.meter.selected_rows for one in running)
            times = step_times(engine.step, num_steps, self._device, before)
            moved = (engine.stats().fetched_bytes_total - begun) / (num_steps + WARM_UP_STEPS)
            num_selected = sum(one.meter.selected_rows for one in running) - num_selected
            num_missed = sum(one.meter.missed_rows for one in running) - num_missed
            kernels = kernel_times(engine.step, self._device)
            if case.profile is not None:
                write_trace(engine.step, self._device, Path(case.profile) / f"{case}.json")
            assert len(engine.scheduler.with_status(Status.DECODE)) == case.batch, (
                "a sequence ended before the last step"
            )
            usage = running[0].usage()
            row_bytes = row_format(self._shape.head_dim, default_dtype(self._device)).row_bytes
            offloaded = sum(one.num_tokens for one in running if one.offloads)
            return DecodeFigures(
                Spread.of(times),
                peak_bytes(self._device),
                host_bytes=self._shape.kv_bytes(offloaded, row_bytes),
                bytes_moved=moved,
                hit_rate=1 - num_missed / num_selected if num_selected else None,
                attended_tokens=usage.attended_tokens + usage.window_tokens,
                kernels=kernels,
                mean_ms=sum(times) / len(times) if interval > 1 else None,
            )

    def _fill(self, worker: Assembled, case: DecodeCase, num_tokens: int) -> list[Sequence]:
        """Have every sequence decode. Raises NotMeasurable when one is refused, or has no room beside the others."""
        failures: list[Exception] = []

        def note(event: Event) -> None:
            if isinstance(event, ErrorEvent):
                failures.append(event.error)

        rng = random.Random(0)
        for number in range(case.batch):
            prompt = tuple(rng.randrange(self._shape.vocab_size) for _ in range(case.context))
            worker.engine.submit(request_of(case, number, prompt, num_tokens), note)
        while len(running := worker.engine.scheduler.with_status(Status.DECODE)) < case.batch:
            is_working = worker.engine.step()
            if failures:
                raise NotMeasurable(str(failures[0]))
            if not is_working:
                raise NotMeasurable(f"{case.batch} sequences do not fit side by side")
        return [worker.runner.sequences[one.request_id] for one in running]


def _interval(policy: Policy, case: DecodeCase) -> int:
    """Steps of which one compresses again; 1 where none does, or too rarely to be timed."""
    plan = policy.plan(case.context, budget_of(case).resolve(case.context))
    if policy.family is not Family.RETAIN or not plan.selects:
        return 1
    again = cast(RetainPolicy, policy).recompression(plan)
    return again.interval if again and 1 < again.interval <= LONGEST_INTERVAL else 1
