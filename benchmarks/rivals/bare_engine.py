"""Carrel's engine with random weights, without the service around it: `Engine.step` as the worker's loop calls it."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.device import default_dtype
from benchmarks.errors import NotMeasurable
from benchmarks.figures import DecodeCase, PrefillCase
from benchmarks.rivals.engine_slots import House
from benchmarks.shapes import ModelShape
from benchmarks.store_child import running_store
from gpu_worker.caches import HotCacheSize, LayerMap
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.models import LoadedModel, load_model
from gpu_worker.policies.base import Family, Policy
from gpu_worker.policies.hyper_parameters import read_options
from gpu_worker.policies.registry import option_names, registry
from gpu_worker.records import Budget, GenerationRequest, IndexDevice, SamplingParams
from gpu_worker.runner.prompts.in_progress import MakePrefill
from gpu_worker.startup.assemble import Assembled, EngineOptions, arena_layout, assemble
from kv_store.client import StoreClient

PREFILL_CHUNK = 8192
# Between looks at an arena that is being registered.
SETTLE_SECONDS = 0.05


def dummy_model(shape: ModelShape, device: torch.device, quantization: str | None = None) -> LoadedModel:
    """Random weights of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        config = shape.config_fields(shape.max_len + BLOCK_SIZE * 8)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return load_model(
            folder,
            device=device,
            dtype=default_dtype(device),
            load_format="dummy",
            quantization=quantization,
        )


def budget_of(case: DecodeCase | PrefillCase) -> Budget:
    return Budget(tokens=case.budget_tokens) if case.budget_tokens else Budget(share=1.0)


def request_of(
    case: DecodeCase | PrefillCase, number: int, prompt: tuple[int, ...], num_tokens: int
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=number)
    return GenerationRequest(f"request-{number}", prompt, sampling, name_of(case), budget_of(case))


def name_of(case: DecodeCase | PrefillCase) -> str:
    """Return the policy's name, without its options."""
    return case.policy.partition(":")[0]


def policies_for(case: DecodeCase | PrefillCase, *given: Policy) -> dict[str, Policy]:
    """Return the registry's policies and those given, with a case's `NAME:FIELD=VALUE,...` options set.

    Raises NotMeasurable.
    """
    name, separator, fields = case.policy.partition(":")
    try:
        words = [f"{name}:{field}" for field in fields.split(",")] if separator else []
        policies = registry(*given, options=read_options(words, option_names()))
    except ValueError as error:
        raise NotMeasurable(str(error)) from error
    if name not in policies:
        raise NotMeasurable(f"no policy {name}; `carrel methods --all` has those there are")
    return policies


@contextmanager
def running_engine(
    house: House,
    policies: dict[str, Policy],
    make_prefill: MakePrefill | None = None,
    *,
    limit: int | None,
    index_device: IndexDevice,
    stores_rows: bool = True,
    num_trainers: int = 1,
) -> Iterator[Assembled]:
    """An engine for this house, and a store with room for the rows and indexes of every sequence.

    policies: by name, the house's among them. limit: bytes of device memory. stores_rows: False leaves sequences that
    have slots for all tokens no room in the store, which takes long to register. Raises NotMeasurable.
    """
    model, batch = house.model, house.batch
    slots = house.slots(limit, index_device)
    layout = arena_layout(model, LayerMap.with_full(model.config.num_layers))
    options = EngineOptions(
        max_model_len=house.capacity,
        slot_bytes=slots.num_bytes,
        max_num_seqs=batch,
        prefill_chunk=house.prefill_chunk,
        hot_cache=HotCacheSize(tokens=slots.hot_tokens),
        policies=policies,
        index_device=index_device,
    )
    # Only sequences that recall have rows in the store.
    is_stored = stores_rows and house.policy.family is Family.RECALL
    stored = batch * house.capacity * layout.num_layers * layout.token_bytes if is_stored else 0
    slabs = -(-int(1.1 * stored) // (2 << 20)) + 8 * layout.num_layers * batch
    with running_store(slabs * (2 << 20), num_trainers) as target:
        client = StoreClient.connect(target, layout, worker_id="benchmark")
        worker = assemble(model, client, options, make_prefill)
        # Registering memory with CUDA holds up the launches of whoever is measured.
        while not worker.runner.offloader.arena.is_settled:
            time.sleep(SETTLE_SECONDS)
        try:
            yield worker
        finally:
            worker.engine.close()
