"""How a GPU's memory is split: sizes that are not allocated yet, limits, and refusals that say what is missing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from engine_rig import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    Rig,
    llama_config,
    make_model,
    request,
    small_policies,
)

from gpu_worker.caches import HotCacheSize
from gpu_worker.caches.layer_map import LayerMap
from gpu_worker.caches.recall.index_training import index_bytes
from gpu_worker.errors import ConfigError
from gpu_worker.layers import RopeSpec
from gpu_worker.models.shape import Shape
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.outlier_heads.policy import OutlierHeads
from gpu_worker.policies.registry import LONG, registry
from gpu_worker.records import Budget, IndexDevice
from gpu_worker.runner.workload import Workload
from gpu_worker.startup import memory
from gpu_worker.startup.memory import (
    MemoryPlan,
    available_bytes,
    fitting_seats,
    fitting_selecting,
    index_room,
    limit_process,
)
from kv_store.client import RowFormat

GIB = 1 << 30
CPU, META = torch.device("cpu"), torch.device("meta")
LLAMA_8B = llama_config(
    Shape(
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        eps=1e-5,
        rope=RopeSpec("default", 500000.0, 128),
        max_model_len=131072,
    )
)
LLAMA_WEIGHTS = 2 * 8_030_261_248


NAMES = ("full", "oracle", "pqcache", "clusterkv", "snapkv", "chelsea")


def llama(max_num_seqs: int = 4, max_model_len: int = 131072, **changes: object) -> Workload:
    shape = CacheShape(max_num_seqs, 32, 8, 4, RowFormat(128), max_model_len, 128**-0.5, META)
    workload = Workload(
        LLAMA_8B,
        shape,
        torch.bfloat16,
        {name: registry()[name] for name in NAMES},
        "pqcache",
        Budget(tokens=2048),
        2048,
        LayerMap.with_full(32),
        IndexDevice.CPU,
    )
    return replace(workload, **changes)


def tiny() -> Workload:
    shape = CacheShape(3, NUM_LAYERS, NUM_KV_HEADS, 3, RowFormat(HEAD_DIM, "fp32"), 1024, HEAD_DIM**-0.5, CPU)
    config = make_model().config
    layers, budget = LayerMap.with_full(NUM_LAYERS), Budget(share=0.3)
    return Workload(
        config, shape, torch.float32, small_policies(), "pqcache", budget, 64, layers, IndexDevice.CPU
    )


@pytest.mark.parametrize(("card", "seats", "selecting"), [(24, 32, 1), (48, 128, 8), (80, 128, 16)])
def test_a_card_has_the_seats_that_it_has_room_for_and_starts(card: int, seats: int, selecting: int) -> None:
    """An 8B model in bfloat16 at 128K, with the default policy and budget."""
    available = card * GIB - LLAMA_WEIGHTS - GIB // 2
    budget = Budget(share=0.1, least=512)
    workload = llama(policies=registry(), default_policy=LONG, default_budget=budget)
    shape = fitting_seats(workload, available, 128, 32)
    assert (shape.max_num_seqs, shape.num_selecting) == (seats, selecting)
    plan = MemoryPlan.of(replace(workload, shape=shape), available)
    assert plan.reserved + plan.slots <= available


def test_seats_that_are_asked_for_are_had_though_fewer_may_select() -> None:
    workload = llama(max_num_seqs=128, policies=registry(), default_policy=LONG)
    with pytest.raises(ConfigError, match="device memory are missing"):
        MemoryPlan.of(workload, 64 * GIB)
    shape = fitting_selecting(workload, 64 * GIB)
    assert (shape.max_num_seqs, shape.num_selecting) == (128, 32)
    assert MemoryPlan.of(replace(workload, shape=shape), 64 * GIB).slots > 0


def test_where_nothing_fits_there_is_one_seat_and_its_plan_says_what_is_missing() -> None:
    assert fitting_seats(llama(), GIB, 64, 32).max_num_seqs == 1
    assert fitting_selecting(llama(), GIB).num_selecting == 1


def test_sizes_are_those_of_what_an_engine_allocates() -> None:
    rig = Rig(max_num_seqs=3, hot_cache=HotCacheSize(tokens=1))
    for policy in ("pqcache", "clusterkv"):
        rig.run(request(policy, policy, 0.3, prompt=900, max_tokens=3))
    recall = rig.runner.caches.recall
    kept = rig.runner.caches.block_tables.tables.nbytes + recall.hot.num_bytes + recall.fixed.table.nbytes
    kept += recall.seen.num_bytes
    planned = memory.seat_bytes(tiny())
    assert kept < planned < kept + recall.fixed.table.nbytes + 1024
    for name in ("pqcache", "clusterkv"):
        policy = small_policies()[name]
        index = recall.indexes.of(policy)
        tensors = [getattr(index, field) for field in type(index).__slots__]
        assert index_bytes(policy, tiny().shape) == sum(one.nbytes for one in tensors if one is not None)
    assert [index_bytes(small_policies()[name], tiny().shape) for name in ("full", "oracle")] == [0, 0]


def test_slots_get_what_the_rest_leaves() -> None:
    plan = MemoryPlan.of(llama(), 60 * GIB)
    assert plan.slots + plan.reserved == 60 * GIB
    assert plan.slots > 40 * GIB
    # Room for other policies' indexes comes and goes by whole policies.
    more = MemoryPlan.of(llama(max_num_seqs=8), 60 * GIB)
    assert more.slots + more.indexes < plan.slots + plan.indexes
    assert MemoryPlan.of(llama(max_model_len=32768), 60 * GIB).slots > plan.slots
    clusters = llama(default_policy="clusterkv")
    trained_here = MemoryPlan.of(replace(clusters, index_device=IndexDevice.AUTO), 60 * GIB)
    assert trained_here.prefill > MemoryPlan.of(clusters, 60 * GIB).prefill
    assert MemoryPlan.of(llama(), 60 * GIB, slot_bytes=3 * GIB).slots == 3 * GIB


def test_indexes_have_the_room_of_the_plan_beside_a_pool_of_its_size_also_when_that_is_settled() -> None:
    plan = MemoryPlan.of(llama(), 60 * GIB)
    assert index_room(llama(), 60 * GIB, plan.slots) == plan.indexes
    # A pool that an earlier worker had, with more memory.
    assert index_room(llama(), 40 * GIB, plan.slots) is None


def test_four_long_sequences_of_llama_8b_fit_in_24_gib() -> None:
    available = 24 * GIB - LLAMA_WEIGHTS - GIB // 2
    plan = MemoryPlan.of(llama(), available)
    budget_bytes = 4 * 2112 * 32 * 8 * 512
    assert plan.slots > budget_bytes


def test_indexes_that_nobody_may_ask_for_do_not_take_the_slots() -> None:
    shape = llama().shape
    pq, clusters, quest = (index_bytes(registry()[name], shape) for name in ("pqcache", "clusterkv", "quest"))
    assert quest > clusters > 2 * GIB > GIB > pq

    def indexes(available: int, default: str = "pqcache", others: tuple[str, ...] = ("clusterkv",)) -> int:
        policies = {name: registry()[name] for name in ("full", "pqcache", *others)}
        return MemoryPlan.of(llama(policies=policies, default_policy=default), available).indexes

    assert indexes(60 * GIB) == pq + clusters
    assert indexes(20 * GIB) == pq
    assert indexes(20 * GIB, "clusterkv") == pq + clusters
    assert indexes(10 * GIB, "clusterkv") == clusters
    # The smaller of two goes first, and never at the cost of a sequence of the greatest length.
    assert indexes(60 * GIB, others=("quest", "clusterkv")) == pq + clusters
    assert indexes(22 * GIB + GIB // 8, "full") == pq


def test_ablations_take_no_room_from_what_is_asked_for() -> None:
    every = registry()
    methods = {
        name: policy
        for name, policy in every.items()
        if name not in ("pqcache+ip", "clusterkv+l2", "clusterkv+ip")
    }
    with_all, without = (
        MemoryPlan.of(llama(policies=policies, default_policy="pqcache"), 60 * GIB)
        for policies in (every, methods)
    )
    assert with_all == without
    assert with_all.indexes > index_bytes(every["pqcache"], llama().shape)


def test_a_retain_policy_needs_its_budget_and_the_state_of_its_slots() -> None:
    dense, snapkv, chelsea = (
        MemoryPlan.of(llama(default_policy=name), 60 * GIB) for name in ("full", "snapkv", "chelsea")
    )
    seats = 4 * 32 * 8
    # Positions and notes of 4096 slots, 2048 + 1024 rounded up; lengths and limits.
    assert snapkv.seats - dense.seats == seats * (4096 * 12 + 8)
    assert chelsea.seats - dense.seats == seats * (4096 * 12 + 8)
    # Of each prompt in progress the window's queries, not the prompt's, and a copy of one's; the keys as float32,
    # twice; tiles of weights.
    keys, queries = 4 * 131072 * 8 * 128, 32 * 32 * 128 * 2
    assert snapkv.prefill - dense.prefill == (4 + 1) * queries + 2 * keys + 4 * 4 * (1 << 26)
    # Means are made of float32 copies.
    assert chelsea.prefill - dense.prefill == 7 * keys
    assert memory.least_slot_bytes(llama(default_policy="snapkv")) < 2200 * 131072
    with pytest.raises(ConfigError):
        MemoryPlan.of(llama(default_policy="full"), 16 * GIB)
    assert MemoryPlan.of(llama(default_policy="snapkv"), 16 * GIB).slots > 2112 * 131072


def planned(name: str, *, full_layers: int = 0) -> MemoryPlan:
    everything = registry(OutlierHeads(Chelsea(), frozenset({(0, 1)}), 8))
    names = (
        "full",
        "snapkv",
        "snapkv+layerwise",
        "snapkv+adakv",
        "chelsea",
        "chelsea+outliers",
        "h2o",
        "infinigen",
    )
    policies = {one: everything[one] for one in names}
    layers = LayerMap.with_full(32, full_layers)
    return MemoryPlan.of(llama(policies=policies, default_policy=name, layers=layers), 80 * GIB)


def test_state_is_as_wide_as_the_head_and_the_layer_that_keep_most() -> None:
    seats = 4 * 32 * 8
    dense, even = planned("full").seats, planned("snapkv").seats
    assert even - dense == seats * (4096 * 12 + 8)
    # The first layer keeps nearly twice the budget; a head may win nearly all that eight have.
    assert planned("snapkv+layerwise").seats - dense == seats * (8192 * 12 + 8)
    assert planned("snapkv+adakv").seats - dense == seats * (16384 * 12 + 8)
    assert planned("chelsea+outliers").seats - planned("chelsea").seats == 4 * 32 * 8 * 12 * (262144 - 4096)
    # With one compressed layer there is nothing to move between layers.
    one_layer = [planned(name, full_layers=31).seats for name in ("full", "snapkv", "snapkv+layerwise")]
    assert one_layer[2] == one_layer[1]
    # What a cache knows of its slots is as large as the layers that it serves.
    assert one_layer[1] - one_layer[0] == (even - dense) // 32
    assert one_layer[0] < dense


def test_who_evicts_needs_room_for_its_choice() -> None:
    assert planned("snapkv").decode == planned("full").decode
    slots = 4 * 32 * 8 * 3072
    assert planned("h2o").decode - planned("full").decode == 2 * 32 * slots
    # Every query of the prompts in progress, and a copy of the longest one's.
    a_query = 32 * 128 * 2
    queries = (131072 + 131072 // 8 + 131072) * a_query
    assert planned("h2o").prefill - planned("snapkv").prefill == queries - (4 + 1) * 32 * a_query
    assert planned("infinigen").prefill - planned("full").prefill == queries + 4 * 4 * (1 << 26)


def test_a_default_that_every_long_request_is_refused_with_is_no_error() -> None:
    refused = OutlierHeads(Chelsea(), frozenset((0, head) for head in range(8)), 8)
    workload = llama(
        policies={"full": registry()["full"], refused.name: refused}, default_policy=refused.name
    )
    assert MemoryPlan.of(workload, 80 * GIB).slots > 0


@pytest.mark.parametrize("policy", ["full", "pqcache"])
@pytest.mark.parametrize("slot_bytes", [None, 1 << 50])
def test_too_little_memory_is_refused_with_the_missing_bytes(policy: str, slot_bytes: int | None) -> None:
    workload = llama(default_policy=policy)
    with pytest.raises(ConfigError, match=r"--max-num-seqs .*--gpu-memory-limit") as caught:
        MemoryPlan.of(workload, 2 * GIB, slot_bytes)
    found = re.match(r"(\d+) bytes", str(caught.value))
    assert found
    missing = int(found[1])
    with pytest.raises(ConfigError):
        MemoryPlan.of(workload, 2 * GIB + missing - 1, slot_bytes)
    if slot_bytes is None:
        plan = MemoryPlan.of(workload, 2 * GIB + missing)
        assert plan.slots == memory.least_slot_bytes(workload)


def test_the_least_is_one_longest_request() -> None:
    token = 32 * 8 * 512
    assert memory.least_slot_bytes(llama(default_policy="full")) == 131072 * token
    assert memory.least_slot_bytes(llama(default_policy="oracle")) == 131072 * token
    assert memory.least_slot_bytes(llama()) == 2112 * token
    assert (
        memory.least_slot_bytes(llama(layers=LayerMap.with_full(32, 2)))
        == (30 * 2112 + 2 * 131072) * token // 32
    )


class FakeCuda:
    """A device of 140 GiB, of which another process may hold a part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reserved: int = 16 * GIB, others: int = 0) -> None:
        self.fraction = 0.0
        free = 140 * GIB - reserved - others - GIB // 2
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 140 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self._set_fraction)

    def _set_fraction(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction


def test_the_limit_counts_all_that_the_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    assert available_bytes(CPU, None) == 123.5 * GIB
    assert available_bytes(CPU, 24 * GIB) == 7.5 * GIB
    assert available_bytes(CPU, 200 * GIB) == 123.5 * GIB
    FakeCuda(monkeypatch, others=100 * GIB)
    assert available_bytes(CPU, 24 * GIB) == 7 * GIB
    assert available_bytes(CPU, 80 * GIB) == 23.5 * GIB


def test_pytorch_is_held_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, reserved=0)
    limit_process(CPU, 24 * GIB)
    assert cuda.fraction == pytest.approx((24 - 0.5 - 0.25) / 140)
    limit_process(CPU, 500 * GIB)
    assert cuda.fraction == 1.0
    with pytest.raises(ConfigError, match=rf"{GIB // 4 + 1} bytes"):
        limit_process(CPU, GIB // 2)
