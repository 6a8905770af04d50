"""Carrel's engine with random weights, without the service around it: `Engine.step` as the worker's loop calls it."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.device import default_dtype, limited, peak_bytes
from benchmarks.errors import NotMeasurable
from benchmarks.records import DecodeCase, DecodeFigures, PrefillCase, PrefillFigures, Spread
from benchmarks.rivals.decode_base import DecodeRival, PrefillRival
from benchmarks.rivals.replayed import Replayed
from benchmarks.rivals.synthetic_prefill import SyntheticPrefill
from benchmarks.shapes import ModelShape
from benchmarks.store_child import running_store
from benchmarks.timing import WARM_UP_STEPS, kernel_times, time_steps
from gpu_worker.config import row_type
from gpu_worker.engine.build import EngineOptions, assemble
from gpu_worker.engine.caches import HotCacheSize
from gpu_worker.engine.engine import Engine, MakePrefill
from gpu_worker.engine.prefill import Prefill
from gpu_worker.engine.records import Budget, Event, GenerationRequest, SamplingParams, TokenEvent
from gpu_worker.engine.sequence import Status
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.models import LoadedModel, load_model
from gpu_worker.policies import Policy, registry
from kv_store.client import Layout, StoreClient

# Beside weights and slots: a prompt's hidden states and rows, workspaces, graphs; and for each token of a sequence,
# layer and KV head its place in the hot cache and its codes.
OTHER_BYTES = 4 << 30
STATE_BYTES = 11
PREFILL_CHUNK = 8192


def decode(shape: ModelShape, device: torch.device) -> DecodeRival:
    return CarrelDecode(shape, device)


def prefill(shape: ModelShape, device: torch.device) -> PrefillRival:
    return CarrelPrefill(shape, device, trains_indexes=False)


def prefill_training_on_gpu(shape: ModelShape, device: torch.device) -> PrefillRival:
    return CarrelPrefill(shape, device, trains_indexes=True)


class CarrelDecode(DecodeRival):
    """Caches and arena are filled at random, and indexes trained on that; then whole engine steps are timed.

    Without a memory limit every sequence has a slot for each of its tokens, and nothing goes to the store. Under one
    the sequences share the slots that fit.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._model = dummy_model(shape, device)

    def measure(self, case: DecodeCase) -> DecodeFigures:
        with limited(self._device, case.gpu_memory_limit):
            return self._decode(case)

    def _decode(self, case: DecodeCase) -> DecodeFigures:
        replayed = Replayed(case, self._shape, self._device) if case.hit_rate is not None else None
        policies = registry(replayed.policy) if replayed else registry()
        # The first in decodes while the others' prompts are filled in.
        most_steps = case.steps + 2 * WARM_UP_STEPS + 3 * case.batch + 16
        slots = self._slots(case, most_steps)
        options = engine_options(case.context + most_steps, case.batch, slots, self._shape, policies, True)
        with running_engine(self._model, self._shape, case.batch, options, SyntheticPrefill, 1) as engine:
            rng = random.Random(0)
            for number in range(case.batch):
                prompt = tuple(rng.randrange(self._shape.vocab_size) for _ in range(case.context))
                engine.submit(request_of(case, number, prompt, most_steps), lambda event: None)
            while len(running := engine._scheduler.with_status(Status.DECODE)) < case.batch:
                engine.step()
            before = replayed.prepare(running) if replayed else None
            for index in range(WARM_UP_STEPS):
                if before:
                    before(index)
                engine.step()
            begun = engine.stats().fetched_bytes_total
            num_missed = sum(one.meter.missed_rows for one in running)
            num_selected = sum(one.meter.selected_rows for one in running)
            spread = time_steps(engine.step, case.steps, self._device, before)
            num_steps = case.steps + WARM_UP_STEPS
            moved = (engine.stats().fetched_bytes_total - begun) / num_steps
            num_selected = sum(one.meter.selected_rows for one in running) - num_selected
            num_missed = sum(one.meter.missed_rows for one in running) - num_missed
            kernels = kernel_times(engine.step, self._device)
            assert all(one.status is Status.DECODE for one in running), (
                "a sequence ended before the last step"
            )
            usage = running[0].usage()
            offloaded = sum(one.num_tokens for one in running if one.offloads)
            return DecodeFigures(
                spread,
                peak_bytes(self._device),
                host_bytes=self._shape.kv_bytes(offloaded, default_dtype(self._device).itemsize),
                bytes_moved=moved,
                hit_rate=1 - num_missed / num_selected if num_selected else None,
                attended_tokens=usage.attended_tokens + usage.window_tokens,
                kernels=kernels,
            )

    def _slots(self, case: DecodeCase, most_steps: int) -> int:
        """Slots of each (layer, KV head) of a sequence: for all its tokens, or its share of what fits the limit."""
        every = -(-(case.context + most_steps) // BLOCK_SIZE) * BLOCK_SIZE
        if case.gpu_memory_limit is None:
            return every
        row_bytes = self._shape.row_elements * default_dtype(self._device).itemsize
        weights = self._shape.num_weights * default_dtype(self._device).itemsize
        heads = self._shape.num_layers * self._shape.num_kv_heads * case.batch
        room = case.gpu_memory_limit - weights - OTHER_BYTES - heads * every * STATE_BYTES
        if room <= 0:
            raise NotMeasurable(
                f"the weights and what else is needed leave nothing of {case.gpu_memory_limit} bytes"
            )
        return min(every, room // (heads * row_bytes) // BLOCK_SIZE * BLOCK_SIZE)


class CarrelPrefill(PrefillRival):
    """Real prompts of random tokens, from submission to the first and to the second token."""

    def __init__(self, shape: ModelShape, device: torch.device, trains_indexes: bool) -> None:
        self._shape, self._device = shape, device
        self._trains_indexes = trains_indexes
        self._model = dummy_model(shape, device)

    def measure(self, case: PrefillCase) -> PrefillFigures:
        with limited(self._device, case.gpu_memory_limit):
            return self._prefill(case)

    def _prefill(self, case: PrefillCase) -> PrefillFigures:
        every = -(-(case.context + 16) // BLOCK_SIZE) * BLOCK_SIZE
        options = engine_options(case.context + 16, 1, every, self._shape, registry(), self._trains_indexes)
        num_trainers = max(1, (os.cpu_count() or 2) - 2)
        firsts, seconds = [], []
        with running_engine(self._model, self._shape, 1, options, Prefill, num_trainers) as engine:
            for number in range(case.repeats + 1):
                rng = random.Random(number)
                # The first one only warms up: kernels, memory.
                length = case.context if number else min(case.context, 2 * PREFILL_CHUNK + 1)
                prompt = tuple(rng.randrange(self._shape.vocab_size) for _ in range(length))
                times: list[float] = []

                def note(event: Event, times: list[float] = times) -> None:
                    if isinstance(event, TokenEvent):
                        times.append(time.perf_counter())

                begun = time.perf_counter()
                engine.submit(request_of(case, number, prompt, 4), note)
                while engine.has_work:
                    engine.step()
                if number:
                    firsts.append(1e3 * (times[0] - begun))
                    seconds.append(1e3 * (times[1] - begun))
            return PrefillFigures(Spread.of(firsts), Spread.of(seconds), peak_bytes(self._device))


def dummy_model(shape: ModelShape, device: torch.device) -> LoadedModel:
    """Random weights of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        config = shape.config_fields(shape.max_len + BLOCK_SIZE * 8)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return load_model(folder, device=device, dtype=default_dtype(device), load_format="dummy")


def engine_options(
    max_model_len: int,
    batch: int,
    num_slots: int,
    shape: ModelShape,
    policies: dict[str, Policy],
    trains_indexes: bool,
) -> EngineOptions:
    """num_slots: of each (layer, KV head) of a sequence."""
    itemsize = 2 if torch.cuda.is_available() else 4
    heads = shape.num_layers * shape.num_kv_heads
    return EngineOptions(
        max_model_len=max_model_len,
        slot_bytes=batch * heads * (num_slots + BLOCK_SIZE) * shape.row_elements * itemsize,
        max_num_seqs=batch,
        prefill_chunk=PREFILL_CHUNK,
        hot_cache=HotCacheSize(tokens=num_slots),
        policies=policies,
        trains_indexes=trains_indexes,
    )


def request_of(
    case: DecodeCase | PrefillCase, number: int, prompt: tuple[int, ...], num_tokens: int
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=number)
    budget = Budget(tokens=case.budget_tokens) if case.budget_tokens else Budget(share=1.0)
    return GenerationRequest(f"request-{number}", prompt, sampling, case.policy, budget)


@contextmanager
def running_engine(
    model: LoadedModel,
    shape: ModelShape,
    batch: int,
    options: EngineOptions,
    make_prefill: MakePrefill,
    num_trainers: int,
) -> Iterator[Engine]:
    """An engine and a store that has room for the whole context of every sequence and for its indexes."""
    dtype = model.decoder.dtype
    kv_bytes = shape.kv_bytes(options.max_model_len, dtype.itemsize)
    slabs = -(-int(1.1 * batch * kv_bytes) // (2 << 20)) + 8 * shape.num_layers * batch
    with running_store(slabs * (2 << 20), num_trainers) as target:
        layout = Layout(
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            row_type(str(dtype).removeprefix("torch.")),
        )
        client = StoreClient.connect(target, layout, worker_id="benchmark")
        engine = assemble(model, client, options, make_prefill)
        try:
            yield engine
        finally:
            engine.close()
