"""Where the device is quick the store trains codebooks only; the worker codes the keys, and answers do not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_rig import NUM_LAYERS, Rig, random_prompt, request, small_policies
from offload_rig import count_calls

from gpu_worker.caches import HotCacheSize
from gpu_worker.caches.recall import index_training
from gpu_worker.policies.pqcache import policy as pqcache
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import registry
from gpu_worker.records import GenerationRequest, IndexDevice

ROOMY, LEAST = HotCacheSize(), HotCacheSize(tokens=1)
# The store trains all layers of it, with as many iterations as it makes by default.
FIXED = {**small_policies(), "pqcache": PQCache(num_bits=3, num_sink=4, max_iterations=10)}


def requests() -> list[GenerationRequest]:
    return [
        request("a", "pqcache", 0.25, prompt=random_prompt(150, 2), max_tokens=45),
        request("b", "pqcache", 17, prompt=random_prompt(200, 3), max_tokens=20),
        request("d", "full", prompt=random_prompt(33, 1), max_tokens=30),
    ]


def answers(rig: Rig) -> dict[str, list[int]]:
    rig.run(*requests())
    tokens = {one.request_id: rig.records[one.request_id].tokens for one in requests()}
    rig.check_empty()
    return tokens


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_training, "is_quick", lambda device: True)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return answers(Rig(max_num_seqs=4, hot_cache=ROOMY, policies=FIXED))


def codebooks_only(builds: list[tuple[object, ...]]) -> list[bool]:
    """Return for each index that the store trained whether only its codebooks were wanted."""
    return [params.codebooks_only for _, _, _, _, params, *_ in builds]  # type: ignore[attr-defined]


@pytest.mark.parametrize("coded", [8192, 7])
def test_codes_of_the_worker_give_the_answers_of_those_of_the_store(
    coded: int, quick: None, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pqcache, "CODED", coded)
    rig = Rig(max_num_seqs=4, hot_cache=ROOMY, policies=FIXED)
    builds = count_calls(rig.store, "build_index")
    assert answers(rig) == expected
    assert codebooks_only(builds) == [True] * 2 * NUM_LAYERS


def test_who_has_not_every_row_gets_codes_from_the_store(quick: None, expected: dict[str, list[int]]) -> None:
    rig = Rig(max_num_seqs=4, hot_cache=LEAST, policies=FIXED)
    builds = count_calls(rig.store, "build_index")
    assert answers(rig) == expected
    assert codebooks_only(builds) == [False] * 2 * NUM_LAYERS


@pytest.mark.parametrize("hot_cache", [ROOMY, LEAST])
def test_what_no_layer_hides_the_device_trains(
    quick: None, hot_cache: HotCacheSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_training, "UNHIDDEN_LAYERS", 2)
    free = registry(PQCache(num_bits=4))
    alone = Rig(max_num_seqs=4, hot_cache=hot_cache, policies=free, trains_indexes=True)
    rig = Rig(max_num_seqs=4, hot_cache=hot_cache, policies=free)
    builds = count_calls(rig.store, "build_index")
    asked_for = request("a", "pqcache", 0.25, prompt=random_prompt(150, 2), max_tokens=45)
    for each in (rig, alone):
        each.run(asked_for)
    assert [layer for _, layer, *_ in builds] == list(range(NUM_LAYERS - 2))
    indexes = [each.runner.caches.recall.indexes.of(free["pqcache"]) for each in (rig, alone)]
    assert torch.equal(indexes[0].codebooks[0, -2:], indexes[1].codebooks[0, -2:])
    # Where the number of iterations is given, the store trains all of it.
    for fixed in (PQCache(max_iterations=4), PQCache(metric="ip")):
        assert not fixed.prompt_job(fixed.plan(500, 100), 32, 400).is_quick


@pytest.mark.parametrize("hot_cache", [ROOMY, LEAST])
def test_a_gpu_trains_clusters_unless_they_are_left_to_the_store(
    quick: None, hot_cache: HotCacheSize
) -> None:
    """K-means of a whole prompt is not bounded in time: the second token would wait for the store's cores."""
    one = request("one", "clusterkv", 0.2, prompt=random_prompt(130, 4), max_tokens=90)
    tokens, num_segments = {}, {}
    for device in IndexDevice:
        rig = Rig(hot_cache=hot_cache, policies=FIXED, index_device=device)
        rig.submit(one)
        while len(rig.records["one"].tokens) < 80:
            rig.step()
        tokens[device], num_segments[device] = rig.records["one"].tokens, len(rig.store.segments)
        rig.drain()
    assert tokens[IndexDevice.AUTO] == tokens[IndexDevice.GPU]
    assert num_segments[IndexDevice.AUTO] == num_segments[IndexDevice.GPU] == 0
    assert num_segments[IndexDevice.CPU] > 0


@pytest.mark.parametrize("hot_cache", [ROOMY, LEAST])
def test_indexes_are_taken_over_while_later_layers_are_computed(hot_cache: HotCacheSize) -> None:
    rig = Rig(max_num_seqs=4, hot_cache=hot_cache, policies=FIXED)
    taken, load = [], rig.runner.caches.recall.load

    def note(sequence, trained, timeout_seconds):  # type: ignore[no-untyped-def]
        is_loaded = load(sequence, trained, timeout_seconds)
        if is_loaded:
            taken.append((trained.layer, bool(rig.runner.prefills)))
        return is_loaded

    rig.runner.caches.recall.load = note  # type: ignore[method-assign]
    rig.run(requests()[0])
    # In order, each once, and but for the last ones before the prompt is done.
    assert [layer for layer, _ in taken] == list(range(NUM_LAYERS))
    assert taken[0][1]


def test_by_inner_product_the_store_codes() -> None:
    by_product, by_l2 = (
        policy.prompt_job(policy.plan(500, 100), 32, 400) for policy in (PQCache(metric="ip"), PQCache())
    )
    assert by_product.coarsened() == by_product
    assert by_l2.coarsened().needs_keys
    assert by_l2.coarsened().params == replace(by_l2.params, codebooks_only=True)
