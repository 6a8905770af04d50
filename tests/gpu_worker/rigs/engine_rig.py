"""An engine over a tiny random model and a store in memory, and what a test asks of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial

import torch
from mapped_pages import MappedPages
from strict_store import StrictStore

from gpu_worker.caches import HotCacheSize
from gpu_worker.caches.layer_map import LayerMap
from gpu_worker.engine.request import Status
from gpu_worker.layers import LayerSpec, RopeSpec
from gpu_worker.models import Decoder, LoadedModel, ModelConfig
from gpu_worker.models.shape import Shape
from gpu_worker.policies.base import Family, Policy
from gpu_worker.policies.cam.policy import CaM
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.h2o.policy import H2OCompensated
from gpu_worker.policies.infinigen.policy import InfiniGen
from gpu_worker.policies.infllm.policy import InfLLM
from gpu_worker.policies.nacl.policy import NACL
from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.outlier_heads.policy import OutlierHeads
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.protokv.policy import ProtoKV
from gpu_worker.policies.pyramidkv.policy import PyramidKV
from gpu_worker.policies.quest.policy import Quest
from gpu_worker.policies.registry import SCORED, registry
from gpu_worker.policies.scissorhands.policy import Scissorhands
from gpu_worker.policies.semantickv.policy import SemanticKV
from gpu_worker.policies.snapkv.policy import SnapKV
from gpu_worker.policies.sparq.policy import SparQ
from gpu_worker.records import (
    Budget,
    CompleteEvent,
    EngineStats,
    ErrorEvent,
    Event,
    FinishReason,
    GenerationRequest,
    IndexDevice,
    SamplingParams,
    TokenEvent,
    Usage,
)
from gpu_worker.runner.prompts.in_progress import MakePrefill
from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.runner.steps.decode import DecodeStep
from gpu_worker.startup.assemble import EngineOptions, MakeCache, MakeDecode, assemble
from gpu_worker.startup.auto_length import FEW_TOKENS
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import block_bytes
from kv_store.client import Layout, RowFormat, StoreClient

VOCAB_SIZE = 97
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 3, 2, 16
LAYOUT = Layout(NUM_LAYERS, NUM_KV_HEADS, RowFormat(HEAD_DIM, "fp32"))
TOKEN_BYTES = NUM_LAYERS * LAYOUT.token_bytes


LAYER_HEADS = NUM_LAYERS * NUM_KV_HEADS
BLOCK_BYTES = block_bytes(LAYOUT.row_format)
# Of an iteration that ends after its first quantum, however fast that is.
ONE_QUANTUM = 1e-12

SHAPE = Shape(
    model_type="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=64,
    num_layers=NUM_LAYERS,
    num_heads=3 * NUM_KV_HEADS,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    eps=1e-5,
    rope=RopeSpec("default", 10000.0, HEAD_DIM),
    max_model_len=4096,
)


def llama_config(shape: Shape = SHAPE) -> ModelConfig:
    """A plain Llama's configuration."""
    return shape.model(LayerSpec(shape.eps, shape.attention(), shape.gated_mlp()))


def make_model(eos_token_ids: tuple[int, ...] = (), seed: int = 0, group: int = 3) -> LoadedModel:
    """Weights large enough that attention is peaked and that greedy tokens vary; the head is its own. group: query
    heads of a KV head."""
    config = llama_config(replace(SHAPE, num_heads=group * NUM_KV_HEADS, eos_token_ids=eos_token_ids))
    decoder = Decoder(config, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            scale = 1.6 if "qkv" in name else 1.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(scale * noise / parameter.shape[1] ** 0.5)
    return LoadedModel(config, decoder, 0, "tiny")


def small_policies() -> dict[str, Policy]:
    """The policies with hyper-parameters that select already from short prompts."""
    return registry(*small_policies_alone())


def small_policies_alone() -> tuple[Policy, ...]:
    """The policies whose hyper-parameters differ from those in `registry`."""
    return (
        PQCache(num_bits=3, num_sink=4),
        ClusterKV(num_sink=4, tokens_per_cluster=10, window_size=40),
        Oracle(num_sink=4),
    )


def every_small_policy() -> dict[str, Policy]:
    """All policies by name, alone and in their wrappers, with hyper-parameters for prompts of some hundred tokens."""
    chelsea = Chelsea(num_sink=4, num_recent=6, chunk=16, interval_tokens=9)
    return registry(
        *small_policies_alone(),
        Quest(page_size=4),
        SparQ(num_sink=4, num_channels=2),
        InfiniGen(),
        InfLLM(block_size=8, repr_topk=2, num_sink=4, chunk_size=16),
        H2OCompensated(num_sink=4),
        Scissorhands(window_size=30, recent_ratio=0.05),
        PyramidKV(window=6, kernel=3),
        CaM(merge_size=3, window_size=6),
        chelsea,
        SnapKV(window=6, kernel=3),
        SemanticKV(num_sink=4, recent_share=0.05, semantic_share=0.05),
        ProtoKV(window=6, chunk_length=8, num_bits=2, num_irregular=6),
        NACL(num_sink=4, protected_share=0.1),
        OutlierHeads(chelsea, frozenset({(1, 0)}), NUM_KV_HEADS),
    )


def tried() -> dict[str, Policy]:
    """Each method and variant of `every_small_policy` that selects, and the wrappers around H2O alone, which evicts,
    scores while it decodes, and shares unequally within them: what else they wrap reaches them by the same calls."""
    return {
        name: policy
        for name, policy in every_small_policy().items()
        if policy.family is not Family.DENSE
        and (name.partition("+")[2] not in SCORED or name.startswith("h2o+"))
    }


def pool_of(blocks_per_head: int) -> int:
    """Bytes of a pool with so many blocks for each layer and KV head."""
    return blocks_per_head * LAYER_HEADS * BLOCK_BYTES


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(VOCAB_SIZE) for _ in range(length))


def request(
    request_id: str,
    policy: str = "full",
    budget: Budget | float | int = 1.0,
    *,
    prompt: tuple[int, ...] | int = 120,
    max_tokens: int = 12,
    num_prefill: int = 0,
    measure: bool = False,
    stop: tuple[int, ...] = (),
    ignore_eos: bool = True,
) -> GenerationRequest:
    """A greedy request. `prompt` may be a length; `budget` a share (float) or a number of tokens (int)."""
    if isinstance(budget, float):
        budget = Budget(share=budget)
    elif isinstance(budget, int):
        budget = Budget(tokens=budget)
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop, ignore_eos=ignore_eos, seed=1
    )
    ids = random_prompt(prompt) if isinstance(prompt, int) else prompt
    return GenerationRequest(request_id, ids, sampling, policy, budget, num_prefill, measure)


def mixed_requests() -> list[GenerationRequest]:
    """Unequal length, policy, budget, output and protocol, prompts that fill slabs and that do not; one is measured."""
    return [
        request("a", "full", prompt=random_prompt(33, 1), max_tokens=20),
        request("b", "pqcache", 0.25, prompt=random_prompt(150, 2), max_tokens=30),
        request("c", "pqcache", 17, prompt=random_prompt(96, 3), max_tokens=20),
        request("d", "clusterkv", 0.2, prompt=random_prompt(130, 4), max_tokens=50),
        request("e", "clusterkv", 30, prompt=random_prompt(140, 5), max_tokens=12, num_prefill=88),
        request("f", "oracle", 0.1, prompt=random_prompt(140, 6), max_tokens=15),
        request("g", "oracle", 1.0, prompt=random_prompt(7, 7), max_tokens=15),
        request("h", "pqcache", 25, prompt=random_prompt(90, 8), max_tokens=12, num_prefill=50),
        request("i", "clusterkv", 1.0, prompt=random_prompt(40, 9), max_tokens=12),
        request("j", "pqcache", 30, prompt=random_prompt(100, 10), max_tokens=15, measure=True),
    ]


@dataclass
class Record:
    """The events of one request, in order."""

    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenEvent)]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def complete(self) -> CompleteEvent:
        assert isinstance(self.last, CompleteEvent), self.last
        return self.last

    @property
    def usage(self) -> Usage:
        return self.complete.usage

    @property
    def error(self) -> Exception:
        assert isinstance(self.last, ErrorEvent), self.last
        return self.last.error

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.last, CompleteEvent | ErrorEvent)


class Rig:
    """An engine, its store and the records of what was submitted."""

    def __init__(
        self,
        model: LoadedModel | None = None,
        *,
        max_num_seqs: int = 8,
        slot_bytes: int = 64 << 20,
        hot_cache: HotCacheSize | None = None,
        prefill_chunk: int = 64,
        full_layers: int = 0,
        max_model_len: int = 1024,
        capacity_tokens: int = 1 << 20,
        tokens_per_slab: int = 64,
        policies: dict[str, Policy] | None = None,
        trains_indexes: bool = False,
        index_device: IndexDevice = IndexDevice.AUTO,
        max_full_tokens: int = FEW_TOKENS,
        make_prefill: MakePrefill = Prefill,
        client: StoreClient | None = None,
        layout: Layout = LAYOUT,
        reuses_prefixes: bool = False,
        itl_seconds: float = ONE_QUANTUM,
        stretch: float = 4.0,
        max_joining: int | None = None,
        make_decode: MakeDecode = DecodeStep,
        runs_ahead: bool = False,
        reads_slots: bool = False,
        layers: LayerMap | None = None,
        more_caches: Mapping[str, MakeCache] | None = None,
        page_bytes: int | None = None,
    ) -> None:
        """client: of another store than one in memory. layout: of the model's rows. itl_seconds: of an iteration; the
        least has one quantum. layers: instead of `full_layers`. page_bytes: of the pool, where
        all that grows with tokens is counted."""
        self.model = model or make_model()
        self.store = StrictStore(layout, capacity_tokens, tokens_per_slab)
        options = EngineOptions(
            max_model_len=max_model_len,
            slot_bytes=slot_bytes,
            max_num_seqs=max_num_seqs,
            prefill_chunk=prefill_chunk,
            hot_cache=hot_cache or HotCacheSize(),
            layers=layers or LayerMap.with_full(NUM_LAYERS, full_layers),
            more_caches=more_caches or {},
            policies=policies or small_policies(),
            index_device=IndexDevice.GPU if trains_indexes else index_device,
            reuses_prefixes=reuses_prefixes,
            itl_seconds=itl_seconds,
            stretch=stretch,
            max_joining=max_joining,
            max_full_tokens=max_full_tokens,
            runs_ahead=runs_ahead,
            reads_slots=reads_slots,
            make_pages=partial(MappedPages, page_bytes=page_bytes) if page_bytes else None,
        )
        self.client = client or self.store
        self.worker = assemble(self.model, self.client, options, make_prefill, make_decode)  # type: ignore[arg-type]
        self.engine, self.runner = self.worker.engine, self.worker.runner
        self.records: dict[str, Record] = {}
        self.asked: dict[str, GenerationRequest] = {}
        self._alike = full_layers, trains_indexes, frozenset(options.policies.items())

    def submit(self, *requests: GenerationRequest) -> None:
        for one in requests:
            record = Record()
            self.engine.submit(one, record.events.append)
            self.records[one.request_id], self.asked[one.request_id] = record, one

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()

    def sequence(self, name: str) -> Sequence:
        """The place of a request that waits or runs."""
        return self.runner.sequences[name]

    def status(self, name: str) -> Status:
        """The status of a request that waits or runs."""
        found = self.engine.scheduler.find(name)
        assert found is not None, f"{name} is over, or was never submitted"
        return found.status

    @property
    def decoding(self) -> list[Sequence]:
        decoding = self.engine.scheduler.with_status(Status.DECODE)
        return [self.runner.sequences[each.request_id] for each in decoding]

    def step_until(self, is_reached: Callable[[], object], most: int = 500) -> None:
        for _ in range(most):
            if is_reached():
                return
            self.engine.step()
        raise AssertionError(f"not reached within {most} steps")

    def step_to(self, name: str, status: Status, num_tokens: int = 0) -> Sequence:
        """Step until a request is there, with so many tokens told."""

        def is_there() -> bool:
            found = self.engine.scheduler.find(name)
            is_so = found is not None and found.status is status
            return is_so and len(self.records[name].tokens) >= num_tokens

        self.step_until(is_there)
        return self.sequence(name)

    def drain(self, most: int = 5000) -> None:
        """Step until nothing is left; fails where the engine does not come to an end."""
        self.step_until(lambda: not self.engine.has_work, most)

    def run(self, *requests: GenerationRequest) -> list[Record]:
        self.submit(*requests)
        self.drain()
        return [self.records[one.request_id] for one in requests]

    def tokens(self, one: GenerationRequest) -> list[int]:
        return self.run(one)[0].tokens

    def check_answers(self, failed: Mapping[str, type[Exception]] = {}) -> None:
        """Check that answers are those of each request alone, and what aborted and failed ones have is their beginning.

        failed: the errors that requests end with; no other does.
        """
        for name, one in self.asked.items():
            record, alone = (
                self.records[name],
                [*_tokens_alone(replace(one, request_id="alone"), *self._alike)],
            )
            assert sum(isinstance(event, CompleteEvent | ErrorEvent) for event in record.events) == 1, name
            if name in failed:
                assert type(record.error) is failed[name], name
            is_whole = name not in failed and record.complete.finish_reason is not FinishReason.ABORT
            assert record.tokens == (alone if is_whole else alone[: len(record.tokens)]), name

    def check_empty(self) -> None:
        """No request left anything behind: blocks, seats, rows of the store."""
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.slot_used_tokens) == (0, 0, 0)
        assert not self.store.rows
        assert not self.runner.sequences
        assert self.engine.scheduler.num_free_seats == self.engine.info.max_num_seqs
        assert self.runner.pool.num_free_blocks == self.runner.pool.num_blocks
        assert not self.runner.indexing
        assert not self.runner.prefills
        assert not self.runner.offloader.extents


def counted(stats: EngineStats) -> EngineStats:
    """Without times, which depend on the transport and the machine, and what the order of a sum rounds away."""
    times, nothing = {f.name for f in fields(EngineStats) if f.name.endswith("_seconds")}, EngineStats()
    shares = stats.selected_tokens_ratio
    rounded = replace(shares, sum=round(shares.sum, 9))
    return replace(stats, selected_tokens_ratio=rounded, **{name: getattr(nothing, name) for name in times})


def tokens_alone(one: GenerationRequest, *, full_layers: int = 0) -> list[int]:
    """Return a request's answer from an engine that has nothing else to do, with all that it needs."""
    policies = frozenset(small_policies().items())
    return [*_tokens_alone(replace(one, request_id="alone"), full_layers, False, policies)]


@cache
def _tokens_alone(
    one: GenerationRequest, full_layers: int, trains_indexes: bool, policies: frozenset[tuple[str, Policy]]
) -> tuple[int, ...]:
    rig = Rig(full_layers=full_layers, trains_indexes=trains_indexes, policies=dict(policies))
    return tuple(rig.tokens(one))
