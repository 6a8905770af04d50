"""Assembles an engine from its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from gpu_worker.caches import Cache, CacheSet, DenseCache, HotCacheSize, RecallCache, RetainCache
from gpu_worker.caches.layer_map import FULL, POLICY, LayerMap
from gpu_worker.caches.probe import Probe
from gpu_worker.engine.admission import Admission
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.outbox import Outbox
from gpu_worker.engine.pace import Pace, PromptSeconds
from gpu_worker.engine.patience import PATIENCE_SECONDS, Patience
from gpu_worker.engine.preemption import Preemption
from gpu_worker.engine.prompt_room import PromptRoom
from gpu_worker.engine.scheduler import STRETCH, Scheduler
from gpu_worker.errors import ConfigError, ModelError
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.memory.base import Pages
from gpu_worker.memory.cuda_pages import CudaPages
from gpu_worker.models import Decoder, LoadedModel, ModelConfig
from gpu_worker.policies.base import CacheShape, Family, Policy
from gpu_worker.policies.registry import AUTO, LONG, registry
from gpu_worker.records import Budget, EngineInfo, IndexDevice
from gpu_worker.runner.intake import Intake
from gpu_worker.runner.prompts.captured import ShortPass
from gpu_worker.runner.prompts.in_progress import MakePrefill, PrefillChoice, Prefills
from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.runner.runner import LocalRunner
from gpu_worker.runner.steps.decode import DecodeStep
from gpu_worker.startup.auto_length import FEW_TOKENS
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.resident_prefixes import ResidentPrefixes
from gpu_worker.state.sequence import ring_size
from gpu_worker.state.slot_pool import SlotPool, block_bytes
from gpu_worker.store.offload import Offloader
from gpu_worker.store.prefixes import Prefixes, model_root
from kv_store.client import Layout, RowFormat, StoreClient

# Makes a cache of layers of this shape. Its slots lie in the pool where the tables say.
MakeCache = Callable[[CacheShape, SlotPool, BlockTables], Cache]
MakeDecode = Callable[[Decoder, CacheSet, Offloader, SlotPool, bool], DecodeStep]

# Up to so many tokens a prompt adds less time to another's pass through the layers than one of its own takes before its
# first token: launches, and reading the weights. A longer one would only let the ones before it wait. Measured with
# carrel-nano on a CPU; a GPU computes some hundred tokens while it reads the weights.
JOINING_TOKENS = {"cpu": 32, "cuda": 512}


@dataclass(frozen=True, slots=True)
class Assembled:
    """An engine, and the runner that executes its plans."""

    engine: Engine
    runner: LocalRunner


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine, without those of its model and its store.

    slot_bytes: the slot pool's size.
    max_full_tokens: longest context that the policy `auto` attends in full.
    """

    max_model_len: int
    slot_bytes: int
    max_num_seqs: int = 8
    prefill_chunk: int = 2048
    hot_cache: HotCacheSize = field(default_factory=HotCacheSize)
    # None: policies serve all.
    layers: LayerMap | None = None
    # Of layers of another kind than `FULL` and `POLICY`, by the name that `layers` gives.
    more_caches: Mapping[str, MakeCache] = field(default_factory=dict)
    default_policy: str = LONG
    default_budget: Budget = field(default_factory=lambda: Budget(share=0.1))
    policies: dict[str, Policy] = field(default_factory=registry)
    # That a request may name; none: all.
    allowed_policies: tuple[str, ...] = ()
    # On the model's device; else the store trains them.
    index_device: IndexDevice = IndexDevice.AUTO
    max_full_tokens: int = FEW_TOKENS
    # Of the store's rows, for prompts that begin alike.
    reuses_prefixes: bool = False
    # As `Pace`, `Scheduler` and `Admission` have them; of the last, None: what suits the device.
    itl_seconds: float | None = None
    stretch: float = STRETCH
    max_joining: int | None = None
    # As `Patience` has it.
    store_patience_seconds: float = PATIENCE_SECONDS
    seed: int | None = None
    captures_graphs: bool = True
    # Of the pool that one request of the greatest length takes at least; 0: not known.
    context_bytes: int = 0
    # Makes the pages that hold the pool, of so many bytes; None: a GPU's; on a CPU only slots are counted.
    make_pages: Callable[[int], Pages] | None = None
    # As `Engine` has it; None: where it saves time, which is on a GPU.
    runs_ahead: bool | None = None
    # Whether known prefixes are read from slots that still hold them; None: where that saves time, which is on a GPU.
    reads_slots: bool | None = None


def assemble(
    model: LoadedModel,
    client: StoreClient,
    options: EngineOptions,
    make_prefill: MakePrefill | None = None,
    make_decode: MakeDecode = DecodeStep,
) -> Assembled:
    """Assemble an engine and its runner over a loaded model and an attached store, which they own from then on.

    make_prefill: computes prompts; None: what suits the device. A benchmark of decoding fills caches at random instead.
    make_decode: takes what DecodeStep does.
    """
    decoder, config = model.decoder, model.config
    device = decoder.device
    shape = cache_shape(model, options.max_num_seqs, options.max_model_len)
    layers = options.layers or LayerMap.with_full(config.num_layers)
    make_cache = {FULL: DenseCache, **options.more_caches}
    _check_layers(layers, config.num_layers, make_cache, client)
    # Before the pool takes the memory.
    root = model_root(model)
    num_blocks = count_blocks(options.slot_bytes, config, shape.row_format)
    pool = SlotPool(num_blocks, shape.row_format, device, _pages(num_blocks, shape, options))
    max_slots = options.max_model_len + BLOCK_SIZE
    shapes = {name: shape.part(layers.layers_of(name)) for name in (*layers.names, POLICY)}
    tables = {
        name: BlockTables(pool, one.max_num_seqs, one.num_layers, one.num_kv_heads, max_slots)
        for name, one in shapes.items()
    }
    reuses_prefixes = options.reuses_prefixes and layers.keeps_all
    offloader = Offloader(
        client,
        device,
        num_seats=shape.num_seats,
        max_model_len=options.max_model_len,
        # On a CPU training hides under nothing, and results must not depend on time.
        hides_training=device.type == "cuda",
        model=root,
        prefixes=Prefixes(root if reuses_prefixes else None, client.tokens_per_slab),
    )
    default = LONG if options.default_policy == AUTO else options.default_policy
    kept, of_policies = layers.kept_of(POLICY), (shapes[POLICY], pool, tables[POLICY])
    probe = Probe(offloader, shape.scale, kept)
    recall = RecallCache(
        *of_policies,
        offloader,
        probe,
        options.hot_cache,
        options.index_device,
        kept,
        _usual_fixed(options.policies, default, options.default_budget, options.max_model_len),
    )
    retain, whole = RetainCache(*of_policies, probe), DenseCache(shapes[POLICY], pool, tables[POLICY])
    for_all = {
        name: make_cache[name](shapes[name], pool, tables[name]) for name in layers.names if name != POLICY
    }
    reads_slots = device.type == "cuda" if options.reads_slots is None else options.reads_slots
    tokens_per_slab = client.tokens_per_slab if reads_slots and layers.keeps_all else 0
    residents = ResidentPrefixes(pool, tokens_per_slab, config.num_layers, config.num_kv_heads)
    caches = CacheSet(shape, layers, pool, for_all, whole, retain, recall, residents)
    intake = Intake(
        options.policies,
        config.vocab_size,
        config.eos_token_ids,
        options.seed,
        has_indexes=not client.selects_in_store,
        max_model_len=options.max_model_len,
    )
    runner = LocalRunner(
        intake,
        pool,
        caches,
        offloader,
        make_decode(decoder, caches, offloader, pool, options.captures_graphs),
        Prefills(
            make_prefill or usual_prefill(decoder, options),
            decoder,
            caches,
            offloader,
            options.prefill_chunk,
            options.max_model_len,
        ),
        device,
        config.num_layers * config.num_kv_heads,
    )
    return Assembled(_engine(_info(model, options, num_blocks, client), runner, model, options), runner)


def _engine(info: EngineInfo, runner: LocalRunner, model: LoadedModel, options: EngineOptions) -> Engine:
    is_cuda, kind = model.decoder.device.type == "cuda", model.decoder.device.type
    pace, room = Pace(options.itl_seconds), PromptRoom(options.max_model_len, options.prefill_chunk)
    estimate = PromptSeconds(pace, model.config, room)
    scheduler = Scheduler(options.max_num_seqs, room, estimate, options.stretch)
    preemption = Preemption(scheduler, runner)
    max_joining = options.max_joining or JOINING_TOKENS[kind]
    return Engine(
        info,
        runner,
        scheduler,
        Admission(scheduler, preemption, runner, options.max_full_tokens, max_joining),
        preemption,
        Patience(options.store_patience_seconds),
        pace,
        Outbox(holds=is_cuda),
        runs_ahead=is_cuda if options.runs_ahead is None else options.runs_ahead,
    )


def _pages(num_blocks: int, shape: CacheShape, options: EngineOptions) -> Pages | None:
    num_bytes = num_blocks * block_bytes(shape.row_format)
    if options.make_pages is not None:
        return options.make_pages(num_bytes)
    return CudaPages(num_bytes, shape.device) if shape.device.type == "cuda" else None


def count_blocks(slot_bytes: int, config: ModelConfig, row_format: RowFormat) -> int:
    """Blocks of slots in this memory. Raises ConfigError when they are too few."""
    num_blocks = slot_bytes // block_bytes(row_format)
    if num_blocks < config.num_layers * config.num_kv_heads:
        raise ConfigError(
            f"--slot-memory {slot_bytes} holds {num_blocks} blocks; one for each of "
            f"{config.num_layers} layers and {config.num_kv_heads} KV heads is the least there is"
        )
    return num_blocks


def _check_layers(layers: LayerMap, num_layers: int, names: Collection[str], client: StoreClient) -> None:
    """Raises ValueError where a layer has no cache, or the store keeps another number of layers."""
    if layers.num_layers != num_layers:
        raise ValueError(
            f"{layers.num_layers} layers are mapped to caches; the model has {num_layers}: map each"
        )
    if unknown := set(layers.names) - {POLICY, *names}:
        raise ValueError(f"layers are mapped to {sorted(unknown)}; give the caches in `more_caches`")
    if client.layout.num_layers != layers.num_kept:
        raise ValueError(
            f"the store keeps {client.layout.num_layers} layers, the map {layers.num_kept}; connect with a layout of "
            "the layers that are kept"
        )


def usual_prefill(decoder: Decoder, options: EngineOptions) -> MakePrefill:
    """On a GPU short prompts' passes are captured."""
    if decoder.device.type != "cuda" or not options.captures_graphs:
        return Prefill
    return PrefillChoice(ShortPass(decoder, min(options.prefill_chunk, options.max_model_len)))


def arena_layout(model: LoadedModel, layers: LayerMap) -> Layout:
    """The layout of the arena that keeps the model's rows in some of the layers."""
    return Layout(layers.num_kept, model.config.num_kv_heads, model.decoder.row_format)


def cache_shape(model: LoadedModel, max_num_seqs: int, max_model_len: int) -> CacheShape:
    decoder, config = model.decoder, model.config
    if any(each.sinks or each.soft_cap for each in config.attentions):
        raise ModelError(f"{config.model_type}: no cache here attends with sinks or a soft cap")
    return CacheShape(
        max_num_seqs=max_num_seqs,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        group_size=config.group_size,
        row_format=decoder.row_format,
        max_model_len=max_model_len,
        scale=decoder.attention_scale,
        device=decoder.device,
        dtype=decoder.dtype,
    )


def _usual_fixed(policies: dict[str, Policy], name: str, budget: Budget, length: int) -> int:
    """Sinks, window and new token of a prompt of this length under this policy; 0 where it does not recall."""
    policy = policies.get(name)
    if policy is None or policy.family is not Family.RECALL:
        return 0
    plan = policy.plan(length, budget.resolve(length))
    return plan.num_sink + ring_size(policy, plan) if plan.selects else 0


def _info(model: LoadedModel, options: EngineOptions, num_blocks: int, client: StoreClient) -> EngineInfo:
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
        policies=tuple(sorted(options.allowed_policies or (AUTO, *options.policies))),
        default_policy=options.default_policy,
        default_budget=options.default_budget,
        num_parameters=model.num_parameters,
        slot_capacity_tokens=num_blocks * BLOCK_SIZE // (config.num_layers * config.num_kv_heads),
        transport=client.transport,
        arena_token_bytes=client.layout.num_layers * client.layout.token_bytes,
        context_capacity=_context_capacity(options, client),
    )


def _context_capacity(options: EngineOptions, client: StoreClient) -> int:
    """Return how many requests of the greatest length the pool and the arena hold at once; 0: not known."""
    if not options.context_bytes:
        return 0
    row_bytes = client.layout.num_layers * client.layout.token_bytes
    in_arena = client.stats().arena_bytes // (options.max_model_len * row_bytes)
    return min(options.max_num_seqs, options.slot_bytes // options.context_bytes, in_arena)
