"""Rows that the device itself moves to and from the arena: the same answers and accounts as through the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_rig import (
    LAYOUT,
    TOKEN_BYTES,
    Record,
    Rig,
    counted,
    make_model,
    mixed_requests,
    random_prompt,
    request,
)
from offload_rig import attached, count_calls, restart
from waiting import PATIENCE, wait_until

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from gpu_worker.errors import InvalidLogits
from gpu_worker.models import LoadedModel
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import registry
from gpu_worker.records import EngineStats, Usage
from kv_store.disk.files import TierFiles
from kv_store.local import LocalStore

LEAST = HotCacheSize(tokens=1)
POISON = 96


@contextmanager
def arena_rig(
    transport: str = "zero_copy",
    model: LoadedModel | None = None,
    max_num_seqs: int = 8,
    reuses_prefixes: bool = False,
    **options: Any,
) -> Iterator[tuple[LocalStore, Rig]]:
    """An engine over a store of 16 tokens a slab, with the least slots there are: much of what is selected misses."""
    policies = registry(
        PQCache(num_bits=3, num_sink=4, max_iterations=3),
        ClusterKV(num_sink=4, tokens_per_cluster=10, window_size=40, max_iterations=3),
        Oracle(num_sink=4),
    )
    with attached(LAYOUT, transport, num_slabs=512, **options) as (store, client):
        rig = Rig(
            model,
            max_num_seqs=max_num_seqs,
            hot_cache=LEAST,
            max_model_len=256,
            policies=policies,
            client=client,
            reuses_prefixes=reuses_prefixes,
        )
        assert (rig.runner.offloader.arena.view is None) is (transport != "zero_copy")
        yield store, rig


def untimed(usage: Usage) -> Usage:
    """Without what depends on when its index came: who shares its steps, and so how sums are rounded."""
    mass = None if usage.attention_mass is None else round(usage.attention_mass, 6)
    return replace(usage, queue_ms=0.0, prefill_ms=0.0, index_wait_ms=0.0, decode_ms=0.0, attention_mass=mass)


def served(transport: str) -> tuple[list[Record], EngineStats]:
    with arena_rig(transport) as (_, rig):
        records = rig.run(*mixed_requests())
        stats = rig.engine.stats()
        held = rig.client.stats()
        assert (held.num_sequences, held.held_bytes) == (0, 0)
        if rig.runner.offloader.arena.view is not None:
            assert bool((rig.runner.offloader.arena.view.slab_tables == -1).all())
        return records, stats


def test_the_arena_gives_the_hosts_tokens_and_accounts() -> None:
    (by_device, device_stats), (by_host, host_stats) = served("zero_copy"), served("shm")
    assert [record.tokens for record in by_device] == [record.tokens for record in by_host]
    for device, host in zip(by_device, by_host, strict=True):
        assert untimed(device.usage) == untimed(host.usage)
    assert counted(device_stats) == counted(host_stats)
    # What the store gathers is copied then; on a CPU a worker that maps the arena takes rows to their slots itself.
    assert sum(host_stats.h2d_copy_seconds.counts) == sum(host_stats.gather_seconds.counts)
    assert sum(device_stats.h2d_copy_seconds.counts) < sum(device_stats.gather_seconds.counts)
    for stats in (device_stats, host_stats):
        for times in (stats.index_search_seconds, stats.gather_seconds, stats.offload_seconds):
            assert sum(times.counts) > 0
            assert times.sum > 0
    assert sum(host_stats.decode_stall_seconds["rows"].counts) > 0
    assert 0 < device_stats.hit_rows_total < device_stats.selected_rows_total
    tokens = sum(record.usage.offloaded_tokens for record in by_device)
    assert device_stats.offloaded_bytes_total == tokens * TOKEN_BYTES


def poisoned_model() -> LoadedModel:
    model = make_model()
    model.decoder.embedding.weight.data[POISON] = float("nan")
    return model


def tame(length: int, seed: int) -> tuple[int, ...]:
    return tuple(token % 85 for token in random_prompt(length, seed))


def test_what_a_failed_request_fetched_is_not_charged_to_the_next_on_its_seat() -> None:
    victim = request("victim", "pqcache", 30, prompt=(*tame(130, 1), POISON, 5), num_prefill=100)
    one = request("one", "pqcache", 30, prompt=tame(120, 2), max_tokens=20)
    with arena_rig(model=poisoned_model(), max_num_seqs=1) as (_, rig):
        alone = rig.run(one)[0].usage
        total = rig.engine.stats().fetched_bytes_total
        after = rig.run(victim, replace(one, request_id="after"))[1].usage
        assert isinstance(rig.records["victim"].error, InvalidLogits)
        assert untimed(after) == untimed(alone)
        # But it counts for the engine.
        stats = rig.engine.stats()
        assert stats.fetched_bytes_total > 2 * total
        missed = stats.fetched_bytes_total // LAYOUT.row_format.row_bytes
        assert stats.hit_rows_total == stats.selected_rows_total - missed


def test_an_aborted_request_leaves_its_seat_as_it_found_it() -> None:
    one = request("one", "pqcache", 30, prompt=random_prompt(120, 2), max_tokens=20)
    with arena_rig(max_num_seqs=1) as (_, rig):
        alone = rig.run(one)[0]
        rig.submit(request("aborted", "clusterkv", 40, prompt=random_prompt(200, 3), max_tokens=50))
        while len(rig.records["aborted"].tokens) < 45:
            rig.step()
        rig.engine.abort("aborted")
        again = rig.run(replace(one, request_id="again"))[0]
    assert again.tokens == alone.tokens
    assert untimed(again.usage) == untimed(alone.usage)


def test_a_store_that_was_restarted_is_read_and_written_anew() -> None:
    one = request("one", "pqcache", 30, prompt=random_prompt(120, 2), max_tokens=20)
    with arena_rig() as (store, rig):
        alone = rig.run(one)[0]
        rig.submit(request("lost", "clusterkv", 30, prompt=random_prompt(120, 3), max_tokens=60))
        while len(rig.records["lost"].tokens) < 10:
            rig.step()
        before = rig.runner.offloader.arena.view
        restart(store, rig.client)
        again = rig.run(replace(one, request_id="again"))[0]
        assert rig.runner.offloader.arena.view is not before
        assert again.tokens == alone.tokens
        assert untimed(again.usage) == untimed(alone.usage)
        assert isinstance(rig.records["lost"].error, Exception)


@pytest.mark.parametrize("num_prefill", [95, 96, 97])
def test_a_request_whose_last_token_fills_a_slab_is_accounted_for(num_prefill: int) -> None:
    # 16 tokens a slab: the last step's token is the last of a slab, or the first of one, or neither.
    with arena_rig() as (_, rig):
        usage = rig.run(request("one", "oracle", 30, prompt=num_prefill, max_tokens=17))[0].usage
        assert usage.offloaded_tokens == num_prefill + 16
        assert rig.engine.stats().offloaded_bytes_total == usage.offloaded_tokens * TOKEN_BYTES


@pytest.mark.parametrize("transport", ["zero_copy", "shm", "grpc"])
def test_prompts_that_begin_alike_share_slabs_and_answer_as_alone(transport: str) -> None:
    document = random_prompt(150, 8)
    first, *others = (
        request("first", "pqcache", 0.25, prompt=document + random_prompt(9, 9), max_tokens=20),
        request("second", "pqcache", 0.25, prompt=document + random_prompt(21, 10), max_tokens=20),
        request("third", "clusterkv", 0.25, prompt=document, max_tokens=30),
    )
    alone = {}
    for one in others:
        with arena_rig(transport) as (_, rig):
            alone[one.request_id] = rig.run(one)[0]
    with arena_rig(transport, reuses_prefixes=True) as (_, rig):
        rig.run(first)
        client = rig.client
        # Its slabs are free for others, and still known.
        assert client.stats().num_sequences == 0
        records = rig.run(*others)
        # Nine slabs of 16 tokens, in the arena once for all.
        assert [record.usage.cached_tokens for record in records] == [144, 144]
        for record, one in zip(records, others, strict=True):
            assert record.tokens == alone[one.request_id].tokens
            assert record.usage.bytes_moved == alone[one.request_id].usage.bytes_moved
        again = rig.run(replace(first, request_id="again"))[0]
        assert again.usage.cached_tokens == 144
        assert again.tokens == rig.records["first"].tokens


def test_a_second_turn_of_bitkeys_has_nothing_trained_and_answers_as_alone() -> None:
    first = request("first", "bitkeys", 0.25, prompt=random_prompt(150, 8), max_tokens=40)
    with arena_rig(reuses_prefixes=True) as (_, rig):
        builds = count_calls(rig.client, "build_index")
        turn = (*first.prompt_token_ids, *rig.run(first)[0].tokens, *random_prompt(9, 9))
        second = rig.run(request("second", "bitkeys", 0.25, prompt=turn, max_tokens=20))[0]
        assert second.usage.cached_tokens == 144
        assert builds == []
    with arena_rig() as (_, rig):
        alone = rig.run(request("second", "bitkeys", 0.25, prompt=turn, max_tokens=20))[0]
        assert second.tokens == alone.tokens


@pytest.mark.parametrize(
    ("policy", "budget", "transport"), [("full", 1.0, "zero_copy"), ("pqcache", 0.25, "shm")]
)
def test_a_flipped_bit_in_a_known_prefix_gives_the_tokens_of_a_cold_run(
    policy: str, budget: float, transport: str
) -> None:
    document = random_prompt(150, 8)
    ones = [
        request(f"{number}", policy, budget, prompt=(*document, 5, number), max_tokens=12)
        for number in range(4)
    ]
    with arena_rig(transport, reuses_prefixes=True) as (store, rig):
        cold = [replace(one, request_id=f"cold {one.request_id}", shares_prefix=False) for one in ones]
        alone = [record.tokens for record in rig.run(*cold)]
        # Who comes first leaves the prefix behind, another who is alone with it reads it.
        for one, tokens, flipped in zip(ones, alone, (0, 0x40, 0, 0xFF), strict=True):
            store.server.store.settle()
            every = rig.client.arena.reshape(-1, store.config.slab_bytes)
            every[:, 76:80] ^= flipped
            record = rig.run(one)[0]
            assert record.tokens == tokens
            assert record.usage.cached_tokens == (0 if flipped or one is ones[0] else 144)
            # 9 slabs of each of 3 layers.
            assert rig.engine.stats().corrupt_segments_total % 27 == 0
        assert rig.engine.stats().corrupt_segments_total == 54
        assert rig.client.stats().num_sequences == 0


def test_what_the_store_kept_on_its_disk_is_read_and_others_do_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, read_column = threading.Event(), TierFiles.read_column

    def read_when_told(files: TierFiles, name: bytes, slabs: Any) -> bool:
        assert may_read.wait(PATIENCE)
        return read_column(files, name, slabs)

    monkeypatch.setattr(TierFiles, "read_column", read_when_told)
    document = random_prompt(150, 8)
    with arena_rig(reuses_prefixes=True, disk=tmp_path) as (store, rig):
        for policy, budget in (("oracle", 0.3), ("full", 1.0)):
            one = request(policy, policy, budget, prompt=(*document, 5), max_tokens=12)
            cold = rig.run(replace(one, request_id=f"cold {policy}", shares_prefix=False))[0].tokens
            rig.run(replace(one, request_id=f"first {policy}"))
            store.server.store.settle()
            store.restart()
            wait_until(rig.runner.offloader.extents.renew)
            may_read.clear()
            rig.submit(one)
            unknown = random_prompt(60, len(policy))
            rig.submit(request(f"other {policy}", policy, budget, prompt=unknown, max_tokens=12))
            while len(rig.records[f"other {policy}"].tokens) < 12:
                rig.step()
            assert rig.status(policy) is Status.WAITING
            may_read.set()
            wait_until(lambda: rig.step() is None and not rig.engine.has_work)
            record = rig.records[policy]
            assert (record.tokens, record.usage.cached_tokens) == (cold, 144)


def test_a_full_arena_gives_up_prefixes_before_it_refuses() -> None:
    with arena_rig(reuses_prefixes=True) as (_, rig):
        for number in range(12):
            prompt = random_prompt(200, 20 + number)
            record = rig.run(request(f"{number}", "pqcache", 0.25, prompt=prompt, max_tokens=10))[0]
            assert len(record.tokens) == 10
        rig.client.check()
