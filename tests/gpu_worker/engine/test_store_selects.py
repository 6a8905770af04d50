"""A worker without an index: the store, a process of its own beyond TCP, selects and sends rows along."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from engine_rig import LAYOUT, Rig, random_prompt, request
from offload_rig import attached, count_calls, restart, store_process
from ports import free_port

from gpu_worker.caches import HotCacheSize
from gpu_worker.errors import RequestError, StoreUnavailable
from gpu_worker.policies.bitkeys.policy import BitKeys
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import registry
from gpu_worker.records import GenerationRequest, Usage
from kv_store.client import InvalidStoreRequest, StoreClient

TOKEN = "a secret of the store's tests"
NUM_SLABS = 512


@contextmanager
def remote_client() -> Iterator[StoreClient]:
    """Attach to a store that listens beyond loopback, and so asks for a token. It hands out no arena."""
    port = free_port()
    with store_process(LAYOUT, f"0.0.0.0:{port}", f"127.0.0.1:{port}", "grpc", NUM_SLABS, TOKEN) as client:
        yield client


def rig_over(client: StoreClient) -> Rig:
    """With the least slots there are, so that much of what is selected misses."""
    policies = registry(
        PQCache(num_bits=3, num_sink=4, max_iterations=3),
        PQCache(num_bits=3, num_sink=4, max_iterations=3, metric="ip", names_metric=True),
        ClusterKV(num_sink=4, tokens_per_cluster=10, window_size=40, max_iterations=3),
        Oracle(num_sink=4),
        # A store says nothing of what it does not select.
        BitKeys(rest="none"),
    )
    return Rig(hot_cache=HotCacheSize(tokens=1), max_model_len=256, policies=policies, client=client)


def requests() -> list[GenerationRequest]:
    """Prompts that are decoded in part, tokens that leave the window and are clustered, and one that is measured."""
    return [
        request("full", prompt=40, max_tokens=30),
        request("kept", "snapkv", 0.3, prompt=random_prompt(90, 8), max_tokens=20),
        request("pq", "pqcache", 0.25, prompt=random_prompt(112, 1), max_tokens=30),
        request("pq decoded", "pqcache", 30, prompt=random_prompt(130, 2), num_prefill=96, max_tokens=20),
        request("product", "pqcache+ip", 0.25, prompt=random_prompt(112, 9), max_tokens=20),
        request("bits", "bitkeys", 0.25, prompt=random_prompt(112, 10), max_tokens=30),
        request("bits decoded", "bitkeys", 30, prompt=random_prompt(130, 11), num_prefill=96, max_tokens=20),
        request("clusters", "clusterkv", 0.2, prompt=random_prompt(120, 3), max_tokens=50),
        request("two windows", "clusterkv", 30, prompt=random_prompt(140, 4), num_prefill=88, max_tokens=36),
        request("all", "pqcache", 1.0, prompt=random_prompt(50, 6), max_tokens=20),
        request("measured", "pqcache", 0.3, prompt=random_prompt(100, 7), max_tokens=20, measure=True),
        # All of the budget is sinks and window.
        replace(request("pq window", "pqcache", 0.2), policy_options=(("recent_ratio", "1"),)),
        replace(request("bits window", "bitkeys", 0.2), policy_options=(("recent_ratio", "1"),)),
    ]


def untimed(usage: Usage) -> Usage:
    """Without what depends on when its index came: who shares its steps, and so how sums are rounded."""
    mass = None if usage.attention_mass is None else round(usage.attention_mass, 6)
    return replace(usage, queue_ms=0.0, prefill_ms=0.0, index_wait_ms=0.0, decode_ms=0.0, attention_mass=mass)


def test_answers_and_accounts_are_those_of_an_index_on_the_device() -> None:
    with attached(LAYOUT, "zero_copy", num_slabs=NUM_SLABS) as (_, client):
        expected = rig_over(client).run(*requests())
    with remote_client() as client:
        # No shared memory: neither the arena nor an index can be read.
        with pytest.raises(InvalidStoreRequest, match="maps no arena"):
            _ = client.arena
        rig = rig_over(client)
        found = rig.run(*requests())
        for one, other in zip(found, expected, strict=True):
            assert one.tokens == other.tokens
            assert untimed(one.usage) == untimed(other.usage)
        stats, times = rig.engine.stats(), client.stats().times
        assert 0 < stats.hit_rows_total < stats.selected_rows_total
        # A search of the worker's is a call, in which the store searches for several sequences.
        assert 0 < sum(stats.index_search_seconds.counts) < sum(times.index_search.counts)
        assert times.index_search.sum < stats.index_search_seconds.sum
        assert sum(stats.decode_stall_seconds["rows"].counts) > 0
        assert sum(times.gather.counts) > 0
        assert (client.stats().num_sequences, client.stats().num_indexes) == (0, 0)


def test_one_call_a_layer_brings_positions_and_rows_of_all_sequences() -> None:
    with attached(LAYOUT, "grpc", num_slabs=NUM_SLABS) as (_, client):
        rig = rig_over(client)
        prompt = random_prompt(112, 1)
        rig.submit(*(request(name, "pqcache", 0.25, prompt=prompt, max_tokens=60) for name in "abc"))
        while len(rig.records["c"].tokens) < 2:
            rig.step()
        selections, gathers = count_calls(client, "top_k"), count_calls(client, "gather")
        rig.step()
        assert [layer for layer, *_ in selections] == list(range(LAYOUT.num_layers))
        assert all(len(wanted) == 3 for _, wanted, _ in selections)  # type: ignore[arg-type]
        assert gathers == []


def test_what_lies_on_the_device_is_not_sent() -> None:
    with attached(LAYOUT, "grpc", num_slabs=NUM_SLABS) as (_, client):
        rig = Rig(max_model_len=256, client=client)
        selections = count_calls(client, "top_k")
        record = rig.run(request("a", "pqcache", 0.25, prompt=random_prompt(112, 1)))[0]
        assert record.usage.bytes_moved == 0
        assert selections
        for _, wanted, _ in selections:
            assert all(item.resident is None for item in wanted)  # type: ignore[attr-defined]


def test_a_policy_with_an_index_of_its_own_is_refused_by_name() -> None:
    with attached(LAYOUT, "grpc", num_slabs=NUM_SLABS) as (_, client):
        rig = rig_over(client)
        for name in ("oracle", "quest", "sparq", "infinigen", "infllm"):
            with pytest.raises(RequestError, match=f"'{name}'.*--transport zero_copy") as caught:
                rig.submit(request(name, name, 0.2))
            assert caught.value.param == "carrel.policy"
        assert len(rig.run(request("a", "pqcache", 0.25, prompt=112))[0].tokens) == 12


def test_a_store_that_came_back_ends_what_it_lost_and_serves_the_next() -> None:
    one = request("one", "pqcache", 0.25, prompt=random_prompt(112, 1), max_tokens=30)
    with attached(LAYOUT, "grpc", num_slabs=NUM_SLABS) as (store, client):
        rig = rig_over(client)
        alone = rig.run(one)[0].tokens
        rig.submit(replace(one, request_id="lost"), request("dense", prompt=40, max_tokens=60))
        while len(rig.records["lost"].tokens) < 5:
            rig.step()
        restart(store, client)
        rig.drain()
        assert isinstance(rig.records["lost"].error, StoreUnavailable)
        assert len(rig.records["dense"].tokens) == 60
        assert rig.run(replace(one, request_id="again"))[0].tokens == alone
