"""Slots and an arena that run out: limits of single requests, and many in little memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import LAYOUT, Rig, every_small_policy, pool_of, random_prompt, request, tokens_alone
from offload_rig import attached, store_process

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from gpu_worker.errors import NeverFits
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import registry
from gpu_worker.records import FinishReason, GenerationRequest


def test_rows_of_its_prompt_that_are_still_known_are_not_computed_again() -> None:
    old = request("old", "pqcache", 0.3, prompt=random_prompt(120, 1), max_tokens=70)
    young = request("young", "pqcache", 0.3, prompt=random_prompt(100, 2), max_tokens=90)
    expected = tokens_alone(young)
    rig = Rig(capacity_tokens=256, reuses_prefixes=True)
    rig.submit(old, young)
    rig.step_until(lambda: rig.engine.stats().preemptions_total)
    assert rig.step_to("young", Status.PREFILL).num_cached == 64
    rig.drain()
    record = rig.records["young"]
    assert record.tokens == expected
    # That no other request had left there.
    assert record.usage.cached_tokens == 0


@pytest.mark.parametrize(("policy", "hot_tokens"), [("pqcache", 1), ("clusterkv", 1024)])
def test_one_that_alone_fills_the_arena_in_mid_answer_has_reached_its_length(
    policy: str, hot_tokens: int
) -> None:
    """It misses rows, or the store trains what leaves its window."""
    one = request("one", policy, 0.3, prompt=120, max_tokens=200)
    expected = tokens_alone(one)
    rig = Rig(capacity_tokens=192, hot_cache=HotCacheSize(tokens=hot_tokens))
    record = rig.run(one)[0]
    assert record.complete.finish_reason is FinishReason.LENGTH
    # The last token that is told has no row yet.
    assert record.tokens == expected[: 192 - 120 + 1]
    rig.check_empty()


def test_a_prompt_that_no_arena_holds_is_answered_where_slots_hold_it_and_nothing_is_trained() -> None:
    one = request("one", "bitkeys", 0.1, prompt=256, max_tokens=30)
    expected = tokens_alone(one)
    rig = Rig(capacity_tokens=256)
    assert rig.run(one)[0].tokens == expected
    rig.check_empty()
    # Its slots hold a part.
    rig = Rig(capacity_tokens=256, hot_cache=HotCacheSize(tokens=1))
    assert isinstance(rig.run(one)[0].error, NeverFits)
    rig.check_empty()


def test_what_never_fits_is_refused_at_once_though_others_run() -> None:
    rig = Rig(capacity_tokens=256, slot_bytes=pool_of(30))
    rig.submit(request("runs", "pqcache", 0.3, prompt=120, max_tokens=60))
    rig.step_to("runs", Status.DECODE, 3)
    rig.submit(request("arena", "pqcache", 0.1, prompt=256), request("slots", prompt=1000, max_tokens=1000))
    rig.step(2)
    for name, remedy in (("arena", "--arena-bytes"), ("slots", "--slot-memory")):
        assert isinstance(rig.records[name].error, NeverFits)
        assert remedy in str(rig.records[name].error)
    rig.drain()
    rig.check_empty()


@pytest.mark.parametrize("transport", ["zero_copy", pytest.param("grpc", marks=pytest.mark.slow)])
def test_many_in_a_small_arena_all_end_with_the_answers_of_those_alone(
    transport: str, tmp_path: Path
) -> None:
    """The indexes of the prompts fill the arena too: some find no place, other requests no room in mid-answer."""
    policies = registry(
        PQCache(num_bits=3, num_sink=4, max_iterations=3),
        ClusterKV(num_sink=4, tokens_per_cluster=10, window_size=20, max_iterations=3),
    )
    options = {"policies": policies, "max_model_len": 256, "hot_cache": HotCacheSize(tokens=1)}
    names = ["pqcache", "clusterkv"]
    requests = [
        request(f"r{number}", names[number % 2], 30, prompt=random_prompt(120, number), max_tokens=30)
        for number in range(4)
    ]
    with attached(LAYOUT, transport, num_slabs=512) as (_, client):
        rig = Rig(client=client, **options)
        alone = [rig.tokens(one) for one in requests]
    # 16 tokens a slab: 24 slabs for a prompt and 3 for its index, 9 more for its answer; room for nearly three.
    socket = f"unix:{tmp_path}/s"
    with store_process(LAYOUT, socket, socket, transport, 100) as client:
        rig = Rig(client=client, **options)
        rig.submit(*requests)
        rig.drain(100_000)
        assert [rig.records[one.request_id].tokens for one in requests] == alone
        stats = rig.engine.stats()
        assert stats.requests_failed_total == 0
        assert 0 < stats.preemptions_total <= 3 * len(requests)
        assert client.stats().num_sequences == 0


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_a_prompt_whose_index_does_not_fit_is_refused_before_it_starts(metric: str) -> None:
    policies = registry(PQCache(num_bits=3, num_sink=4, max_iterations=3, metric=metric))
    one = request("one", "pqcache", 30, prompt=120, max_tokens=2)
    # 8 slabs of rows in each of 3 layers, and one with its index.
    for num_slabs, fits in ((26, False), (27, True)):
        with attached(LAYOUT, num_slabs=num_slabs) as (_, client):
            record = Rig(client=client, policies=policies, max_model_len=256).run(one)[0]
            assert (len(record.tokens) == 2) is fits
            if not fits:
                assert isinstance(record.error, NeverFits)
                assert str(4096) in str(record.error)
                assert len(record.events) == 1


CONTEXT = 448
# Five blocks, for what is answered to its end, some times over.
SHORT = 320


def open_ended(
    name: str, policy: str = "full", prompt: int = 60, context: int = CONTEXT
) -> GenerationRequest:
    """It may fill its context, as a chat without max_tokens may."""
    return request(name, policy, 0.3, prompt=prompt, max_tokens=context - prompt)


@pytest.mark.parametrize(
    ("policy", "full_layers"),
    [("full", 0), ("auto", 0), ("h2o", 3), ("bitkeys", 0), ("pqcache", 1), ("oracle", 0)],
)
def test_answers_that_may_fill_the_context_begin_beside_each_other(policy: str, full_layers: int) -> None:
    """None has slots for all that it might need: later ones would wait, or have small hot caches."""
    rig = Rig(
        full_layers=full_layers, max_model_len=CONTEXT, slot_bytes=pool_of(30), policies=every_small_policy()
    )
    names = [f"r{number}" for number in range(4)]
    rig.submit(*(open_ended(name, policy) for name in names))
    rig.step_until(lambda: len(rig.decoding) == 4)
    assert not any(rig.sequence(name).can_miss for name in names)
    # each has its prompt, and some blocks ahead
    assert rig.engine.stats().slot_used_tokens <= 4 * 5 * 64
    assert rig.engine.stats().preemptions_total == 0
    for name in names:
        rig.engine.abort(name)
    rig.drain()
    rig.check_empty()


def test_what_may_fill_a_context_larger_than_all_slots_is_answered_until_they_are_full() -> None:
    one = open_ended("one")
    rig = Rig(max_model_len=CONTEXT, slot_bytes=pool_of(5))
    record = rig.run(one)[0]
    assert record.complete.finish_reason is FinishReason.LENGTH
    # The last token that is told has no slot yet.
    assert record.tokens == tokens_alone(one)[: 5 * 64 - 60 + 1]
    rig.check_empty()


def test_who_gave_way_for_slots_holds_up_nobody_who_needs_the_arena() -> None:
    """Its rows there are free: only slots are missing, and not for another caller's short request."""
    lengths = {"old": 290, "middle": 280, "young": 270}
    rig = Rig(full_layers=3, slot_bytes=pool_of(15))
    rig.submit(
        *(request(name, "pqcache", 1.0, prompt=60, max_tokens=length) for name, length in lengths.items())
    )
    rig.step_until(lambda: rig.engine.stats().preemptions_total)
    assert rig.sequence("old").offloads
    rig.submit(replace(request("chat", "pqcache", 1.0, prompt=30, max_tokens=3), prefix_salt=b"another"))
    rig.step_until(lambda: rig.records["chat"].is_over)
    assert not rig.records["old"].is_over
    rig.drain()
    assert rig.engine.stats().requests_failed_total == 0
    rig.check_empty()
