"""Builds an engine from the worker's options: loads the model, attaches to the store, allocates the memory."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable

import torch

from gpu_worker.caches import HotCacheSize
from gpu_worker.calibration import Calibration, read_calibration
from gpu_worker.config import WorkerConfig, row_type
from gpu_worker.engine.assemble import EngineOptions, assemble, cache_shape
from gpu_worker.engine.auto_policy import AUTO, FEW_TOKENS, LONG, copy_bandwidth, max_full_tokens
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.memory import MemoryPlan, available_bytes, limit_process
from gpu_worker.engine.workload import Workload
from gpu_worker.errors import ConfigError, StoreUnavailable
from gpu_worker.models import LoadedModel, ModelConfig, load_model, ungrouped
from gpu_worker.policies.base import CacheShape, Policy, without_index
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import registry
from kv_store.client import Layout, StoreClient, StoreError

logger = logging.getLogger(__name__)

# (stage, done, total)
Report = Callable[[str, int, int], None]

# Rows of one gather, which bound the response slab that the store keeps for this worker.
MAX_GATHER_ROWS = 1 << 15
# Of the host's memory that is free when the weights are loaded, a CPU's slots' share.
CPU_MEMORY_SHARE = 0.25


def build_engine(config: WorkerConfig, report: Report) -> Engine:
    """Load the model, attach to the store, allocate the memory. Raises ConfigError, ModelError, StoreUnavailable."""
    device = torch.device(config.resolve_device())
    dtype_name = config.resolve_dtype(device.type, None)
    dtype = getattr(torch, dtype_name)
    calibration = read_calibration(config.calibration) if config.calibration else None
    policies = configured_policies(config, calibration)
    if config.policy not in (names := sorted((AUTO, *policies))):
        raise ConfigError(f"--policy {config.policy!r} is unknown; choose one of {', '.join(names)}")
    if config.transport == "grpc" and config.policy != AUTO and policies[config.policy].needs_index_here:
        raise ConfigError(f"--policy {config.policy}: {without_index(policies[config.policy])}")
    if config.gpu_memory_limit_bytes is not None:
        if device.type != "cuda":
            raise ConfigError(
                f"--gpu-memory-limit {config.gpu_memory_limit_bytes} bounds nothing on device {device}; leave it out"
            )
        limit_process(device, config.gpu_memory_limit_bytes)
    model = _load(config, device, dtype, report)
    if calibration is not None:
        calibration.check(model.config)
    if model.config.head_dim % config.pq_num_subvectors:
        raise ConfigError(
            f"--pq-subvectors {config.pq_num_subvectors} does not divide the model's head size "
            f"{model.config.head_dim}; give one that does"
        )
    shape = cache_shape(model, config.max_num_seqs, _max_model_len(config, model.config))
    options = EngineOptions(
        max_model_len=shape.max_model_len,
        slot_bytes=_slot_bytes(config, model, shape, policies),
        max_num_seqs=config.max_num_seqs,
        prefill_chunk=config.prefill_chunk,
        hot_cache=HotCacheSize(config.hot_cache.share, config.hot_cache.tokens),
        full_layers=config.full_layers,
        default_policy=config.policy,
        default_budget=config.budget,
        policies=policies,
        trains_indexes=config.index_device == "gpu",
        max_full_tokens=_max_full_tokens(config, shape, dtype),
        reuses_prefixes=config.prefix_cache == "on",
        seed=config.seed,
    )
    report("attach to the KV store", 0, 1)
    client = connect_store(config.store, model.config, dtype_name, config)
    report("attach to the KV store", 1, 1)
    return assemble(model, client, options)


def configured_policies(config: WorkerConfig, calibration: Calibration | None) -> dict[str, Policy]:
    """All policies by name; those that need a calibration only if there is one."""
    calibrated = calibration.policies(config.outlier_share, config.full_layers) if calibration else ()
    return registry(
        PQCache(
            num_subvectors=config.pq_num_subvectors,
            num_bits=config.pq_nbits,
            max_iterations=config.pq_iterations,
            metric=config.pq_metric,
        ),
        ClusterKV(tokens_per_cluster=config.clusterkv_tokens_per_cluster, metric=config.clusterkv_metric),
        *calibrated,
    )


def connect_store(target: str, model: ModelConfig, dtype_name: str, config: WorkerConfig) -> StoreClient:
    """Attach to the store. Raises StoreUnavailable with the store's own reason."""
    layout = Layout(model.num_layers, model.num_kv_heads, model.head_dim, row_type(dtype_name))
    try:
        return StoreClient.connect(
            target,
            layout,
            worker_id=f"worker-{os.getpid()}-{uuid.uuid4().hex[:8]}",
            transport=config.transport,
            max_gather_rows=MAX_GATHER_ROWS,
            timeout_seconds=config.store_timeout_seconds,
            token=config.store_token,
        )
    except StoreError as error:
        raise StoreUnavailable(f"cannot attach to the KV store at {target}: {error}") from error


def _max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_model_len
    if wanted > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the model's {model.max_model_len}; give at most that"
        )
    return wanted


def _load(config: WorkerConfig, device: torch.device, dtype: torch.dtype, report: Report) -> LoadedModel:
    try:
        model = load_model(
            config.model,
            device=device,
            dtype=dtype,
            revision=config.revision,
            load_format="dummy" if config.load_format == "dummy" else "safetensors",
            progress=lambda done, total: report("load weights", done, total),
        )
        return ungrouped(model) if config.granularity == "q_head" else model
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the weights do not fit: {reason} Give more with --gpu-memory-limit, or take a smaller model"
        ) from error


def _slot_bytes(
    config: WorkerConfig, model: LoadedModel, shape: CacheShape, policies: dict[str, Policy]
) -> int:
    """As configured; else what is left of the device's memory, or a share of the host's."""
    limit, asked = config.gpu_memory_limit_bytes, config.slot_memory_bytes
    if shape.device.type != "cuda":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return asked or int(free * CPU_MEMORY_SHARE)
    if asked is not None and limit is None:
        return asked
    workload = Workload(
        model=model.config,
        shape=shape,
        dtype=model.decoder.dtype,
        policies=policies,
        default_policy=LONG if config.policy == AUTO else config.policy,
        default_budget=config.budget,
        prefill_chunk=config.prefill_chunk,
        full_layers=config.full_layers,
        trains_indexes=config.index_device == "gpu",
        has_indexes=config.transport != "grpc",
    )
    plan = MemoryPlan.of(workload, available_bytes(shape.device, limit), asked)
    logger.info("device memory beside the weights: %s", plan)
    return plan.slots


def _max_full_tokens(config: WorkerConfig, shape: CacheShape, dtype: torch.dtype) -> int:
    if shape.device.type != "cuda":
        return FEW_TOKENS
    row_bytes = 2 * shape.head_dim * dtype.itemsize
    bandwidth = copy_bandwidth(shape.device)
    return max_full_tokens(shape, row_bytes, config.budget, config.pq_num_subvectors, bandwidth)
