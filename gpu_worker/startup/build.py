"""Builds an engine from the worker's options: loads the model, attaches to the store, allocates the memory."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from gpu_worker.caches.layer_map import LayerMap
from gpu_worker.calibration import Calibration, read_calibration
from gpu_worker.config import WorkerConfig, find_device, find_dtype
from gpu_worker.errors import ConfigError, StoreUnavailable
from gpu_worker.kernels.compile_log import log_compiled
from gpu_worker.models import LoadedModel, ModelConfig, check_model, checkpoint_dtype, load_model, ungrouped
from gpu_worker.models.loader import LoadFormat
from gpu_worker.policies.base import CacheShape, Policy, without_index
from gpu_worker.policies.hyper_parameters import read_options
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import AUTO, LONG, OUTLIERS, option_names, registry
from gpu_worker.policies.retain import RetainPolicy
from gpu_worker.records import IndexDevice
from gpu_worker.row_format import row_format
from gpu_worker.runner.workload import Workload
from gpu_worker.startup.assemble import (
    Assembled,
    EngineOptions,
    arena_layout,
    assemble,
    cache_shape,
    count_blocks,
)
from gpu_worker.startup.auto_length import FEW_TOKENS, copy_bandwidth, max_full_tokens
from gpu_worker.startup.earlier_pool import EarlierPool
from gpu_worker.startup.memory import (
    MemoryPlan,
    available_bytes,
    fits,
    fitting_seats,
    index_bytes,
    least_slot_bytes,
    limit_process,
    longest_fitting,
    total_bytes,
)
from gpu_worker.store.traces import Traces
from kv_store.client import StoreClient, StoreError

logger = logging.getLogger(__name__)

# (stage, done, total)
Report = Callable[[str, int, int], None]

# Rows of one gather, which bound the response slab that the store keeps for this worker.
MAX_GATHER_ROWS = 1 << 15
# That one call of the engine's thread may wait for the store.
STORE_CALL_SECONDS = 1.0
# Of the host's memory that is free when the weights are loaded, a CPU's slots' share.
CPU_MEMORY_SHARE = 0.25
# Requests at once, by default.
CPU_SEQS, GPU_SEQS = 8, 256


def build_engine(config: WorkerConfig, report: Report, traces: Traces | None = None) -> Assembled:
    """Load the model, attach to the store, allocate the memory. traces: that calls to the store are part of; None: of
    none. Raises ConfigError, ModelError, StoreUnavailable."""
    device = torch.device(find_device(config.device))
    if device.type == "cuda":
        log_compiled()
    calibration, policies = _chosen_policies(config)
    default = config.default_policy
    limit = _memory_limit(config, device)
    if limit is not None:
        limit_process(device, limit)
    model = _load(config, device, report)
    _check_fit(policies, calibration, model.config)
    layers = LayerMap.with_full(model.config.num_layers, config.full_layers)
    workload = _seated(_workload(config, model, layers, policies), config, limit)
    shape, slot_bytes = workload.shape, _slot_bytes(config, limit, workload)
    if limit is not None:
        # PyTorch does not count the pool.
        limit_process(device, limit - slot_bytes)
    options = EngineOptions(
        max_model_len=shape.max_model_len,
        slot_bytes=slot_bytes,
        context_bytes=least_slot_bytes(workload),
        max_num_seqs=shape.max_num_seqs,
        prefill_chunk=config.prefill_chunk,
        itl_seconds=config.itl_target_ms / 1000 if config.itl_target_ms else None,
        hot_cache=config.hot_cache,
        layers=layers,
        default_policy=default,
        default_budget=config.default_budget,
        policies=policies,
        allowed_policies=config.allowed_policies,
        index_device=IndexDevice(config.index_device),
        max_full_tokens=_max_full_tokens(config, shape, policies),
        reuses_prefixes=config.prefix_cache,
        seed=config.seed,
        captures_graphs=not config.enforce_eager,
    )
    report("attach to the KV store", 0, 1)
    client = connect_store(config, model, layers, traces)
    report("attach to the KV store", 1, 1)
    return assemble(model, client, options)


def check_options(config: WorkerConfig) -> None:
    """Check what can be checked of the options and the model in a moment, without weights, memory or a store.

    Raises the ConfigError or ModelError of `build_engine`.
    """
    device = torch.device(find_device(config.device))
    calibration, policies = _chosen_policies(config)
    _memory_limit(config, device)
    model = check_model(
        config.model,
        revision=config.revision,
        load_format=_load_format(config),
        overrides=config.hf_overrides,
        quantization=_quantization(config),
    )
    if model is None:
        return
    dtype = find_dtype(config.dtype, device.type)
    _check_fit(policies, calibration, model)
    _max_model_len(config, model)
    compute_dtype = getattr(torch, dtype) if dtype else checkpoint_dtype(model)
    if config.slot_memory_bytes is not None:
        count_blocks(config.slot_memory_bytes, model, row_format(model.head_dim, compute_dtype))


def outline(config: WorkerConfig) -> tuple[LoadedModel, Workload]:
    """Return the model without weights, on PyTorch's meta device, and the workload of a GPU with these options.

    Only config.json or the head of a GGUF file is read. Raises ConfigError, ModelError.
    """
    calibration, policies = _chosen_policies(config)
    model = _load(replace(config, load_format="dummy"), torch.device("meta"), lambda *_: None)
    _check_fit(policies, calibration, model.config)
    layers = LayerMap.with_full(model.config.num_layers, config.full_layers)
    return model, _workload(config, model, layers, policies)


def _chosen_policies(config: WorkerConfig) -> tuple[Calibration | None, dict[str, Policy]]:
    """The calibration, if there is one, and all policies. Raises ConfigError."""
    calibration = read_calibration(config.calibration) if config.calibration else None
    policies = configured_policies(config, calibration)
    default = config.default_policy
    if config.transport == "grpc" and default != AUTO and policies[default].needs_index_here:
        raise ConfigError(f"--policy {default}: {without_index(policies[default])}")
    return calibration, policies


def _check_fit(policies: dict[str, Policy], calibration: Calibration | None, model: ModelConfig) -> None:
    """Raises ConfigError for a calibration of another model, and for parts that its heads cannot be cut into."""
    if calibration is not None:
        calibration.check(model)
    num_parts, head_dim = cast(PQCache, policies["pqcache"]).num_subvectors, model.head_dim
    if head_dim % num_parts:
        raise ConfigError(
            f"--policy-options pqcache:num_subvectors={num_parts} does not divide the model's head size {head_dim}; "
            "give one that does"
        )


def _load_format(config: WorkerConfig) -> LoadFormat:
    return "dummy" if config.load_format == "dummy" else "safetensors"


def _quantization(config: WorkerConfig) -> str | None:
    return None if config.quantization == "auto" else config.quantization


def configured_policies(config: WorkerConfig, calibration: Calibration | None) -> dict[str, Policy]:
    """All policies by name; those that need a calibration only if there is one. Raises ConfigError."""
    options = read_options(config.policy_options, option_names(calibration is not None))
    try:
        policies = registry(*((calibration.skewed(),) if calibration else ()), options=options)
        if calibration:
            chelsea = cast(RetainPolicy, policies["chelsea"])
            policies[OUTLIERS] = calibration.with_outliers(
                chelsea, options.get(OUTLIERS, {}), config.full_layers
            )
    except ValueError as error:
        raise ConfigError(f"--policy-options: {error}") from error
    return policies


def connect_store(
    config: WorkerConfig, model: LoadedModel, layers: LayerMap, traces: Traces | None = None
) -> StoreClient:
    """Attach to the store, which is to keep some of the layers. Raises StoreUnavailable with the store's own reason."""
    try:
        return StoreClient.connect(
            config.store,
            arena_layout(model, layers),
            worker_id=f"worker-{os.getpid()}-{uuid.uuid4().hex[:8]}",
            transport=config.transport,
            max_gather_rows=MAX_GATHER_ROWS,
            timeout_seconds=config.store_timeout_s,
            call_seconds=STORE_CALL_SECONDS,
            token=config.store_token,
            root=config.store_root,
            trace_of=(traces or Traces()).find,
        )
    except StoreError as error:
        raise StoreUnavailable(f"cannot attach to the KV store at {config.store}: {error}") from error


def _max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_model_len
    if wanted > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the model's {model.max_model_len}; give at most that"
        )
    return wanted


def _memory_limit(config: WorkerConfig, device: torch.device) -> int | None:
    """Bytes; None: what is free. Raises ConfigError."""
    limit = config.gpu_memory_limit
    if device.type == "cuda":
        # a share, which on a CPU bounds nothing
        return int(limit * torch.cuda.mem_get_info(device)[1]) if isinstance(limit, float) else limit
    if isinstance(limit, int):
        raise ConfigError(f"--gpu-memory-limit {limit} bounds nothing on device {device}; leave it out")
    return None


def _load(config: WorkerConfig, device: torch.device, report: Report) -> LoadedModel:
    dtype = find_dtype(config.dtype, device.type)
    try:
        model = load_model(
            config.model,
            device=device,
            dtype=getattr(torch, dtype) if dtype else None,
            revision=config.revision,
            load_format=_load_format(config),
            max_model_len=config.max_model_len,
            overrides=config.hf_overrides,
            quantization=_quantization(config),
            progress=lambda done, total: report("load weights", done, total),
        )
        return ungrouped(model) if config.granularity == "q_head" else model
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the weights do not fit: {reason} Give more with --gpu-memory-limit, or take a smaller model"
        ) from error


def _workload(
    config: WorkerConfig, model: LoadedModel, layers: LayerMap, policies: dict[str, Policy]
) -> Workload:
    seats = config.max_num_seqs or (CPU_SEQS if model.decoder.device.type == "cpu" else GPU_SEQS)
    return Workload(
        model=model.config,
        shape=cache_shape(model, seats, _max_model_len(config, model.config)),
        dtype=model.decoder.dtype,
        policies=policies,
        default_policy=LONG if config.default_policy == AUTO else config.default_policy,
        default_budget=config.default_budget,
        prefill_chunk=config.prefill_chunk,
        layers=layers,
        index_device=IndexDevice(config.index_device),
        has_indexes=config.transport != "grpc",
        product_bytes=model.decoder.product_bytes,
    )


def _seated(workload: Workload, config: WorkerConfig, limit: int | None) -> Workload:
    """Return the workload with as many seats as are asked for, or as the device has room for."""
    device = workload.shape.device
    if device.type != "cuda" or config.max_num_seqs is not None or config.slot_memory_bytes is not None:
        return workload
    free, found = available_bytes(device, limit), workload
    # By the whole device, so that a worker that is started again has as many; by what is free where others use it too.
    for available in (total_bytes(device, limit), free):
        found = workload.of_seats(fitting_seats(workload, available, GPU_SEQS))
        if fits(found, free):
            break
    return found


def _slot_bytes(config: WorkerConfig, limit: int | None, workload: Workload) -> int:
    """Return the bytes of the pool: as configured; else what is left of the device's memory, or a share of the host's.
    Raises ConfigError with the greatest length that fits."""
    asked, earlier, device = config.slot_memory_bytes, earlier_pool(config), workload.shape.device
    if device.type != "cuda":
        return asked or earlier.settle(lambda: int(available_host_bytes() * CPU_MEMORY_SHARE))
    if asked is not None and limit is None:
        return asked
    available = available_bytes(device, limit)

    def plan_slots() -> int:
        try:
            plan = MemoryPlan.of(workload, available, asked)
        except ConfigError as error:
            if asked is None and (longest := longest_fitting(workload, available)):
                raise ConfigError(f"{error}; --max-model-len {longest} is the most that fits") from error
            raise
        logger.info("device memory beside the weights: %s", plan)
        return plan.slots

    return plan_slots() if asked is not None else earlier.settle(plan_slots)


def earlier_pool(config: WorkerConfig) -> EarlierPool:
    """Return the pool of an earlier worker that listened on the same Unix socket, with the same options."""
    path = Path(f"{config.listen.removeprefix('unix:')}.slots") if config.listen.startswith("unix:") else None
    return EarlierPool(path, repr(config))


def available_host_bytes() -> int:
    """That programs may still fill: pages of files, which fill up as they are read, can go."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _max_full_tokens(config: WorkerConfig, shape: CacheShape, policies: dict[str, Policy]) -> int:
    if shape.device.type != "cuda":
        return FEW_TOKENS
    num_codes = shape.num_layers * shape.num_kv_heads * shape.max_model_len
    code_bytes = index_bytes(policies[LONG], shape) // num_codes
    return max_full_tokens(shape, config.budget, code_bytes, copy_bandwidth(shape.device))
