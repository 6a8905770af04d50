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
    fits,
    fitting_seats,
    limit_process,
    longest_fitting,
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


@pytest.mark.parametrize(("card", "seats"), [(24, 64), (48, 256), (80, 256)])
def test_a_card_has_the_seats_that_it_has_room_for_and_starts(card: int, seats: int) -> None:
    """An 8B model in bfloat16 at 128K, with the default policy and budget."""
    available = card * GIB - LLAMA_WEIGHTS - GIB // 2
    workload = llama(policies=registry(), default_policy=LONG, default_budget=Budget(share=0.1, least=512))
    assert fitting_seats(workload, available, 256) == seats
    plan = MemoryPlan.of(workload.of_seats(seats), available)
    assert plan.prefill + plan.decode + plan.slots == available


def test_a_card_of_80_gib_keeps_93_hundredths_of_the_tokens_that_nothing_else_would() -> None:
    workload = llama(
        256, policies=registry(), default_policy=LONG, default_budget=Budget(share=0.1, least=512)
    )
    plan = MemoryPlan.of(workload, 80 * GIB - LLAMA_WEIGHTS - 2 * GIB)
    assert plan.slots // (32 * 8 * 512) > 430_000


def test_unpacked_rows_of_weights_are_planned_for() -> None:
    """In prompts, in captured passes of short ones, and in steps, which run twice while one is captured."""
    plans = [MemoryPlan.of(llama(product_bytes=size), 64 * GIB) for size in (0, GIB // 8)]
    grown = [new - old for old, new in zip(*((plan.prefill, plan.decode) for plan in plans), strict=True)]
    assert grown[1] == GIB // 4
    # a prompt's storing and training may need more than its products
    assert GIB // 8 <= grown[0] <= GIB // 4
    assert plans[0].slots - plans[1].slots == sum(grown)


def test_where_nothing_fits_there_is_one_seat_and_its_plan_says_what_is_missing() -> None:
    assert fitting_seats(llama(), GIB, 64) == 1
    assert longest_fitting(llama(), GIB) == 0


@pytest.mark.parametrize("policy", ["full", "pqcache"])
def test_the_longest_length_that_fits_fits_and_the_next_does_not(policy: str) -> None:
    workload = llama(default_policy=policy)
    length = longest_fitting(workload, 5 * GIB)
    assert 1024 <= length < 131072
    assert fits(workload.of_length(length), 5 * GIB)
    assert not fits(workload.of_length(length + 1024), 5 * GIB)
    assert longest_fitting(workload, 60 * GIB) == 131072


@pytest.mark.parametrize("name", ["pqcache", "clusterkv"])
def test_the_state_of_a_seat_is_what_an_engine_takes_for_it(name: str) -> None:
    rig = Rig(max_num_seqs=3, hot_cache=HotCacheSize(tokens=1), page_bytes=4096)
    rig.submit(request(name, name, 0.3, prompt=1000, max_tokens=20))
    while not any(event for event in rig.records[name].tokens):
        rig.engine.step()
    (sequence,) = rig.runner.sequences.values()
    pages = sum(
        cache.num_held_pages(sequence.seat) for cache in {one.cache for one in rig.runner.caches.of(sequence)}
    )
    planned = memory.state_bytes(replace(tiny(), default_policy=name))
    # Tensors begin and end within pages; tables are as wide as a power of two.
    assert pages * 4096 // 3 < planned
    assert pages * 4096 > planned // 3
    rig.drain()


def test_slots_get_what_the_rest_leaves() -> None:
    plan = MemoryPlan.of(llama(), 60 * GIB)
    assert plan.slots + plan.prefill + plan.decode == 60 * GIB
    assert plan.slots > 50 * GIB
    # A seat costs its part of the largest step.
    more = MemoryPlan.of(llama(max_num_seqs=256), 60 * GIB)
    assert plan.slots - 4 * GIB < more.slots < plan.slots
    assert MemoryPlan.of(llama(max_model_len=32768), 60 * GIB).slots > plan.slots
    clusters = llama(default_policy="clusterkv")
    trained_here = MemoryPlan.of(replace(clusters, index_device=IndexDevice.AUTO), 60 * GIB)
    assert trained_here.prefill > MemoryPlan.of(clusters, 60 * GIB).prefill
    assert MemoryPlan.of(llama(), 60 * GIB, slot_bytes=3 * GIB).slots == 3 * GIB


def test_a_seat_that_is_empty_takes_less_than_64_kib() -> None:
    few, many = (memory.seat_bytes(llama(seats, max_model_len=131072)) for seats in (32, 256))
    # The plan counts slabs of 64 tokens; those of an 8B model have 512.
    assert (many - few) / 224 / (512 // 64) < 64 << 10


def test_four_long_sequences_of_llama_8b_fit_in_24_gib() -> None:
    available = 24 * GIB - LLAMA_WEIGHTS - GIB // 2
    plan = MemoryPlan.of(llama(), available)
    assert plan.slots > 3 * memory.state_bytes(llama()) + memory.least_slot_bytes(llama())


def test_a_retain_policy_needs_its_budget_and_the_state_of_its_slots() -> None:
    dense, snapkv, chelsea = (
        MemoryPlan.of(llama(default_policy=name), 60 * GIB) for name in ("full", "snapkv", "chelsea")
    )
    # Of each prompt in progress the window's queries, not the prompt's, and a copy of one's; the keys as float32,
    # twice; tiles of weights.
    keys, queries = 4 * 131072 * 8 * 128, 32 * 32 * 128 * 2
    assert snapkv.prefill - dense.prefill == (4 + 1) * queries + 2 * keys + 4 * 4 * (1 << 26)
    # Means are made of float32 copies.
    assert chelsea.prefill - dense.prefill == 7 * keys
    assert memory.least_slot_bytes(llama(default_policy="snapkv")) < 3000 * 131072
    with pytest.raises(ConfigError):
        MemoryPlan.of(llama(default_policy="full"), 16 * GIB)
    assert MemoryPlan.of(llama(default_policy="snapkv"), 16 * GIB).slots > 2112 * 131072


def planned(name: str, *, full_layers: int = 0) -> Workload:
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
    return llama(policies=policies, default_policy=name, layers=LayerMap.with_full(32, full_layers))


def test_state_is_as_wide_as_the_head_and_the_layer_that_keep_most() -> None:
    heads, slot = 32 * 8, 2 * 12
    dense, even = memory.state_bytes(planned("full")), memory.state_bytes(planned("snapkv"))
    assert even - dense == heads * slot * (2048 + 1024)
    # A head may win nearly all that eight have.
    assert memory.state_bytes(planned("snapkv+adakv")) - dense > 4 * (even - dense)
    assert memory.state_bytes(planned("snapkv+layerwise")) > even
    # What a cache knows of its slots is as large as the layers that it serves.
    one_layer = [memory.state_bytes(planned(name, full_layers=31)) for name in ("full", "snapkv")]
    assert one_layer[1] - one_layer[0] == (even - dense) // 32


def test_who_evicts_needs_room_for_its_choice() -> None:
    dense, snapkv, h2o, infinigen = (
        MemoryPlan.of(planned(name), 80 * GIB) for name in ("full", "snapkv", "h2o", "infinigen")
    )
    assert snapkv.decode == dense.decode
    slots = 4 * 32 * 8 * 3072
    assert h2o.decode - dense.decode == 2 * 32 * slots
    # Every query of the prompts in progress, and a copy of the longest one's.
    a_query = 32 * 128 * 2
    queries = (131072 + 131072 // 8 + 131072) * a_query
    assert h2o.prefill - snapkv.prefill == queries - (4 + 1) * 32 * a_query
    assert infinigen.prefill - dense.prefill == queries + 4 * 4 * (1 << 26)


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
    with pytest.raises(ConfigError, match=r"--max-model-len .*--gpu-memory-limit") as caught:
        MemoryPlan.of(workload, 2 * GIB, slot_bytes)
    found = re.match(r"(\d+) bytes", str(caught.value))
    assert found
    missing = int(found[1])
    with pytest.raises(ConfigError):
        MemoryPlan.of(workload, 2 * GIB + missing - 1, slot_bytes)
    if slot_bytes is None:
        plan = MemoryPlan.of(workload, 2 * GIB + missing)
        assert plan.slots == memory.least_slot_bytes(workload)


def test_the_least_is_one_longest_request_with_what_it_has_beside_its_slots() -> None:
    token = 32 * 8 * 512

    def slots(workload: Workload) -> int:
        return memory.least_slot_bytes(workload) - memory.state_bytes(workload) - memory.PAGE_GAPS

    assert slots(llama(default_policy="full")) == 131072 * token
    assert slots(llama(default_policy="oracle")) == 131072 * token
    assert slots(llama()) == 2112 * token
    assert slots(llama(layers=LayerMap.with_full(32, 2))) == (30 * 2112 + 2 * 131072) * token // 32


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
