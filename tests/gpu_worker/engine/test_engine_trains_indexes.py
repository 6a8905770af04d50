"""Indexes that the worker trains itself: the same tokens alone as in a batch, and a store for who may miss only."""

from __future__ import annotations

import pytest
import torch
from engine_rig import NUM_LAYERS, Rig, request

from gpu_worker.caches import HotCacheSize
from gpu_worker.errors import StoreUnavailable
from kv_store.client import StoreUnreachable

SELECTING = ["oracle", "pqcache", "clusterkv"]
ROOMY, LEAST = HotCacheSize(), HotCacheSize(tokens=1)


def make_rig(hot_cache: HotCacheSize = ROOMY, full_layers: int = 0) -> Rig:
    return Rig(max_num_seqs=10, hot_cache=hot_cache, full_layers=full_layers, trains_indexes=True)


@pytest.mark.parametrize("hot_cache", [ROOMY, LEAST])
@pytest.mark.parametrize("policy", SELECTING)
def test_the_store_is_asked_only_where_something_may_miss(policy: str, hot_cache: HotCacheSize) -> None:
    rig = make_rig(hot_cache)
    rig.submit(request("one", policy, 30, max_tokens=100))
    offloads = hot_cache == LEAST and policy != "oracle"
    while not rig.records["one"].is_over:
        assert ("one" in rig.store.rows) is (offloads and rig.engine.scheduler.num_running > 0)
        rig.step()
    usage = rig.records["one"].usage
    assert usage.offloaded_tokens == (219 if offloads else 0)
    assert (usage.hit_rate < 1) is (usage.bytes_moved > 0) is offloads
    assert usage.attended_tokens == 30
    # No index comes from the store.
    assert not rig.store.segments
    rig.check_empty()


def test_a_measured_request_has_its_rows_in_the_store_and_one_that_attends_everything_does_not() -> None:
    rig = make_rig()
    part, whole = rig.run(
        request("part", "pqcache", 30, measure=True), request("whole", "pqcache", 1.0, measure=True)
    )
    assert part.usage.offloaded_tokens == 131
    assert 0 < part.usage.recall_rate < 1
    assert 0 < part.usage.attention_mass < 1
    assert whole.usage.offloaded_tokens == 0
    # Every token has a slot: it is measured by the rows in the store, and served without.
    assert part.usage.host_bytes == 0
    assert (whole.usage.recall_rate, whole.usage.attention_mass) == (1.0, 1.0)


def test_clusters_of_decoded_windows_hold_every_token_once() -> None:
    rig = make_rig()
    rig.submit(request("one", "clusterkv", 30, prompt=130, max_tokens=100))
    while len(rig.records["one"].tokens) < 95:
        rig.step()
    sequence = rig.sequence("one")
    # Two windows of 40 were clustered; the third is under way.
    assert sequence.window_begin == 130 + 80
    index = rig.runner.caches.recall.indexes.of(sequence.policy)
    sizes = index.sizes[sequence.seat]
    assert bool((sizes.sum(dim=-1) == 130 + 80 - 4).all())
    labels = index.labels[sequence.seat, :, :, 4 : 130 + 80]
    for layer in range(NUM_LAYERS):
        for head, of_head in enumerate(labels[layer]):
            counted = torch.bincount(of_head, minlength=sizes.shape[-1])
            assert torch.equal(counted.int(), sizes[layer, head])
            # The prompt's clusters come first, then each window's.
            assert int(of_head[:126].max()) < int(of_head[126:166].min())
            assert int(of_head[126:166].max()) < int(of_head[166:].min())
    rig.drain()


@pytest.mark.parametrize("policy", ["pqcache", "clusterkv"])
def test_a_step_that_breaks_off_is_made_again_by_who_can(policy: str) -> None:
    size = HotCacheSize(tokens=115)
    one = request("one", policy, 30, prompt=70, max_tokens=60)
    expected = Rig(hot_cache=size, trains_indexes=True).tokens(one)
    rig = Rig(hot_cache=size, trains_indexes=True)
    # The longer context does not fit its slots.
    rig.submit(one, request("misses", policy, 30, prompt=400, max_tokens=60))
    while len(rig.records["misses"].tokens) < 5:
        rig.step()
    sequence = rig.sequence("one")
    assert not sequence.offloads
    gather = rig.store.gather

    def refuse(*arguments: object) -> None:
        raise StoreUnreachable("no answer")

    rig.store.gather = refuse  # type: ignore[method-assign,assignment]
    while not rig.records["misses"].is_over:
        rig.step()
    rig.store.gather = gather  # type: ignore[method-assign]
    assert isinstance(rig.records["misses"].error, StoreUnavailable)
    rig.drain()
    assert rig.records["one"].tokens == expected
    assert rig.records["one"].usage.attended_tokens == 30
