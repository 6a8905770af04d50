"""Puts an engine together: the one place where its parts meet."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gpu_worker.caches import CacheSet, DenseCache, HotCacheSize, RecallCache, RetainCache
from gpu_worker.caches.probe import Probe
from gpu_worker.calibration import Calibration, read_calibration
from gpu_worker.config import WorkerConfig, row_type
from gpu_worker.engine.auto_policy import AUTO, FEW_TOKENS, LONG, copy_bandwidth, max_full_tokens
from gpu_worker.engine.decode import DecodeStep
from gpu_worker.engine.engine import Engine, MakePrefill
from gpu_worker.engine.intake import Intake, usual_fixed
from gpu_worker.engine.memory import MemoryPlan, available_bytes, limit_process
from gpu_worker.engine.prefill import Prefill
from gpu_worker.engine.workload import Workload
from gpu_worker.errors import ConfigError, StoreUnavailable
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.models import KeyShift, LoadedModel, ModelConfig, load_model, ungrouped
from gpu_worker.policies.base import CacheShape, Policy
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import registry
from gpu_worker.records import Budget, EngineInfo
from gpu_worker.state.slot_pool import BlockTables, SlotPool
from gpu_worker.store.offload import Offloader
from gpu_worker.store.prefixes import PrefixChain, model_root
from kv_store.client import Layout, StoreClient, StoreError

logger = logging.getLogger(__name__)

# (stage, done, total)
Report = Callable[[str, int, int], None]

# Rows of one gather, which bound the response slab that the store keeps for this worker.
MAX_GATHER_ROWS = 1 << 15
# Of the host's memory that is free when the weights are loaded, a CPU's slots' share.
CPU_MEMORY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is told beside its model and its store.

    slot_bytes: the slot pool's size. max_full_tokens: longest context that the policy `auto` attends whole.
    """

    max_model_len: int
    slot_bytes: int
    max_num_seqs: int = 8
    prefill_chunk: int = 2048
    hot_cache: HotCacheSize = field(default_factory=HotCacheSize)
    full_layers: int = 0
    default_policy: str = "pqcache"
    default_budget: Budget = field(default_factory=lambda: Budget(share=0.1))
    policies: dict[str, Policy] = field(default_factory=registry)
    # On the model's device; else the store trains them.
    trains_indexes: bool = False
    max_full_tokens: int = FEW_TOKENS
    # Of the store's rows, for prompts that begin alike.
    reuses_prefixes: bool = False
    seed: int | None = None


def build_engine(config: WorkerConfig, report: Report) -> Engine:
    """Load the model, attach to the store, take the memory. Raises ConfigError, ModelError, StoreUnavailable."""
    device = torch.device(config.resolve_device())
    dtype_name = config.resolve_dtype(device.type, None)
    dtype = getattr(torch, dtype_name)
    calibration = read_calibration(config.calibration) if config.calibration else None
    policies = configured_policies(config, calibration)
    if config.policy not in (names := sorted((AUTO, *policies))):
        raise ConfigError(f"--policy {config.policy!r} is unknown; choose one of {', '.join(names)}")
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
    shape = _cache_shape(model, config.max_num_seqs, _max_model_len(config, model.config))
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
    """By name, every one; those that need a calibration only where there is one."""
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
        )
    except StoreError as error:
        raise StoreUnavailable(f"cannot attach to the KV store at {target}: {error}") from error


def assemble(
    model: LoadedModel, client: StoreClient, options: EngineOptions, make_prefill: MakePrefill = Prefill
) -> Engine:
    """An engine over a loaded model and an attached store, which it owns from then on.

    make_prefill: who computes prompts; a benchmark of decoding fills caches at random instead.
    """
    decoder, config = model.decoder, model.config
    device, dtype = decoder.device, decoder.dtype
    shape = _cache_shape(model, options.max_num_seqs, options.max_model_len)
    block_bytes = BLOCK_SIZE * 2 * config.head_dim * dtype.itemsize
    num_blocks = options.slot_bytes // block_bytes
    if num_blocks < config.num_layers * config.num_kv_heads:
        raise ConfigError(
            f"--slot-memory {options.slot_bytes} holds {num_blocks} blocks; one for each of "
            f"{config.num_layers} layers and {config.num_kv_heads} KV heads is the least there is"
        )
    pool = SlotPool(num_blocks, 2 * config.head_dim, dtype, device)
    max_slots = options.max_model_len + BLOCK_SIZE
    tables = BlockTables(pool, options.max_num_seqs, config.num_layers, config.num_kv_heads, max_slots)
    offloader = Offloader(
        client,
        config.num_layers,
        dtype,
        device,
        num_seats=options.max_num_seqs,
        max_model_len=options.max_model_len,
        # On a CPU training hides under nothing, and results must not depend on time.
        hides_training=device.type == "cuda",
    )
    default = LONG if options.default_policy == AUTO else options.default_policy
    probe = Probe(offloader, shape.scale)
    recall = RecallCache(
        shape,
        pool,
        tables,
        offloader,
        probe,
        options.hot_cache,
        options.trains_indexes,
        usual_fixed(options.policies, default, options.default_budget, options.max_model_len),
    )
    retain = RetainCache(shape, pool, tables, probe, options.full_layers)
    dense = DenseCache(pool, tables, shape.scale)
    caches = CacheSet(shape, pool, tables, dense, retain, recall, options.full_layers)
    info = _info(model, options, num_blocks, client.transport)
    intake = Intake(
        options.policies,
        config.vocab_size,
        config.eos_token_ids,
        options.seed,
        options.max_full_tokens,
    )
    prefixes = PrefixChain(model_root(model), client.tokens_per_slab) if options.reuses_prefixes else None
    return Engine(
        info=info,
        intake=intake,
        decoder=decoder,
        pool=pool,
        caches=caches,
        offloader=offloader,
        decode=DecodeStep(decoder, caches, offloader, pool),
        prefill_chunk=options.prefill_chunk,
        make_prefill=make_prefill,
        prefixes=prefixes,
    )


def _info(model: LoadedModel, options: EngineOptions, num_blocks: int, transport: str) -> EngineInfo:
    config = model.config
    return EngineInfo(
        model=model.source,
        model_type=config.model_type,
        device=str(model.decoder.device),
        dtype=str(model.decoder.dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        eos_token_ids=config.eos_token_ids,
        policies=tuple(sorted((AUTO, *options.policies))),
        default_policy=options.default_policy,
        default_budget=options.default_budget,
        num_parameters=model.num_parameters,
        slot_capacity_tokens=num_blocks * BLOCK_SIZE // (config.num_layers * config.num_kv_heads),
        transport=transport,
    )


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


def _cache_shape(model: LoadedModel, max_num_seqs: int, max_model_len: int) -> CacheShape:
    decoder, config = model.decoder, model.config
    return CacheShape(
        max_num_seqs=max_num_seqs,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        group_size=config.group_size,
        head_dim=config.head_dim,
        max_model_len=max_model_len,
        scale=decoder.attention_scale,
        device=decoder.device,
        dtype=decoder.dtype,
        key_shift=KeyShift.of(config.rope, decoder.device),
    )


def _slot_bytes(
    config: WorkerConfig, model: LoadedModel, shape: CacheShape, policies: dict[str, Policy]
) -> int:
    """As asked; else what the device's memory has left beside all else, or a share of the host's."""
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
