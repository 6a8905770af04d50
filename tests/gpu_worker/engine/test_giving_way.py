"""Room that runs out: who gives way, waits, and goes on with the same tokens; and who is refused before it starts."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import LAYOUT, Rig, every_small_policy, pool_of, random_prompt, request, tokens_alone
from offload_rig import SLAB_BYTES, attached, count_calls
from waiting import PATIENCE

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from gpu_worker.errors import NeverFits
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import registry
from gpu_worker.records import FinishReason, GenerationRequest, ProgressEvent, TokenEvent
from kv_store.client import StoreClient

ROOT = Path(__file__).resolve().parents[3]
# What a quicker one shows too.
SLOW = pytest.mark.slow


def first(one: GenerationRequest, priority: int = -1) -> GenerationRequest:
    return replace(one, priority=priority)


@pytest.mark.parametrize("policy", ["pqcache", "clusterkv", "oracle"])
def test_the_youngest_gives_way_where_the_arena_is_full_and_goes_on_with_the_same_tokens(policy: str) -> None:
    # Both hold two slabs of four; "old" is the first that needs a third.
    old = request("old", policy, 0.3, prompt=120, max_tokens=70)
    young = request("young", policy, 0.3, prompt=100, max_tokens=90)
    alone = [tokens_alone(one) for one in (old, young)]
    rig = Rig(capacity_tokens=256)
    rig.submit(old, young)
    rig.step_until(lambda: rig.engine.stats().preemptions_total)
    assert rig.status("young") is Status.WAITING
    told = len(rig.records["young"].events)
    tries = count_calls(rig.store, "begin")
    rig.step(5)
    # Nobody who held room has ended.
    assert not tries
    rig.drain()
    assert len(tries) == 1
    assert [rig.records[name].tokens for name in ("old", "young")] == alone
    assert all(isinstance(event, TokenEvent) for event in rig.records["young"].events[told:-1])
    usage = rig.records["young"].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (100, 90, 0)
    assert rig.engine.stats().preemptions_total == 1
    assert rig.engine.stats().requests_failed_total == 0
    rig.check_empty()


def test_the_lowest_priority_gives_way_before_the_youngest() -> None:
    low = first(request("low", "pqcache", 0.3, prompt=120, max_tokens=30), 5)
    usual = request("usual", "pqcache", 0.3, prompt=100, max_tokens=60)
    alone = [tokens_alone(one) for one in (low, usual)]
    rig = Rig(capacity_tokens=256)
    rig.submit(low, usual)
    rig.step_until(lambda: rig.engine.stats().preemptions_total)
    assert rig.status("low") is Status.WAITING
    assert rig.status("usual") is Status.DECODE
    rig.drain()
    assert [rig.records[name].tokens for name in ("low", "usual")] == alone
    rig.check_empty()


def test_who_needs_no_arena_is_not_held_up_by_who_waits_for_it() -> None:
    rig = Rig(capacity_tokens=256)
    rig.submit(
        request("old", "pqcache", 0.3, prompt=120, max_tokens=70),
        request("young", "pqcache", 0.3, prompt=100, max_tokens=90),
    )
    rig.step_until(lambda: rig.engine.stats().preemptions_total)
    rig.submit(request("recalls", "pqcache", 0.3, prompt=100), request("dense", prompt=30, max_tokens=3))
    rig.step_until(lambda: rig.records["dense"].is_over)
    assert not rig.records["recalls"].events
    rig.drain()
    assert rig.engine.stats().requests_failed_total == 0


def test_draws_and_penalties_go_on_where_they_were() -> None:
    old = request("old", "pqcache", 0.3, prompt=120, max_tokens=70)
    young = request("young", "pqcache", 0.3, prompt=100, max_tokens=90)
    sampling = replace(young.sampling, temperature=1.0, seed=3, frequency_penalty=0.4, min_tokens=80)
    young = replace(young, sampling=sampling)
    expected = tokens_alone(young)
    rig = Rig(capacity_tokens=256)
    rig.run(old, young)
    assert rig.engine.stats().preemptions_total == 1
    assert rig.records["young"].tokens == expected


def test_tokens_that_go_through_decode_steps_do_so_again() -> None:
    old = request("old", "clusterkv", 0.3, prompt=120, max_tokens=70)
    young = request("young", "clusterkv", 30, prompt=110, max_tokens=70, num_prefill=80)
    expected = tokens_alone(young)
    rig = Rig(capacity_tokens=256)
    rig.run(old, young)
    assert rig.engine.stats().preemptions_total == 1
    assert rig.records["young"].tokens == expected


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


def test_who_waits_again_can_be_aborted() -> None:
    rig = Rig(capacity_tokens=256)
    rig.submit(
        request("old", "pqcache", 0.3, prompt=120, max_tokens=70),
        request("young", "pqcache", 0.3, prompt=100, max_tokens=90),
    )
    rig.step_until(lambda: rig.engine.stats().preemptions_total)
    said = len(rig.records["young"].tokens)
    rig.engine.abort("young")
    usage = rig.records["young"].usage
    assert (usage.completion_tokens, usage.device_bytes, usage.host_bytes) == (said, 0, 0)
    rig.drain()
    rig.check_empty()


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


@pytest.mark.parametrize("policy", ["pqcache", "bitkeys"])
def test_one_that_alone_fills_the_arena_in_mid_answer_goes_on_from_its_slots(policy: str) -> None:
    one = request("one", policy, 0.3, prompt=120, max_tokens=200)
    expected = tokens_alone(one)
    rig = Rig(capacity_tokens=192)
    rig.submit(one)
    rig.step_to("one", Status.DECODE)
    assert rig.sequence("one").offloads
    rig.drain()
    record = rig.records["one"]
    assert record.tokens == expected
    assert record.complete.finish_reason is FinishReason.LENGTH
    assert record.usage.host_bytes == 0
    assert rig.engine.stats().fallbacks_total["without_store"] == 1
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


@pytest.mark.parametrize(
    ("policy", "full_layers"),
    [("full", 0), ("pqcache", 1), ("clusterkv", 0), ("h2o", 0), ("chelsea", 1), ("scissorhands", 0)],
)
def test_a_more_important_request_gets_slots_from_a_less_important_one(policy: str, full_layers: int) -> None:
    policies = every_small_policy()
    low = request("low", policy, 0.4, prompt=150, max_tokens=60)
    high = first(request("high", prompt=400, max_tokens=20))
    alone = [Rig(policies=policies, full_layers=full_layers).tokens(one) for one in (low, high)]
    rig = Rig(policies=policies, full_layers=full_layers, slot_bytes=pool_of(7))
    rig.submit(low)
    rig.step_to("low", Status.DECODE, 40)
    rig.submit(replace(high, priority=0))
    rig.step(3)
    # Who is as important waits.
    assert rig.status("high") is Status.WAITING
    rig.engine.abort("high")
    rig.submit(high)
    rig.step_to("high", Status.DECODE)
    assert rig.status("low") is Status.WAITING
    rig.drain()
    assert [rig.records[name].tokens for name in ("low", "high")] == alone
    rig.check_empty()


def test_a_prompt_that_gives_way_begins_anew_and_its_progress_is_not_told_twice() -> None:
    low = request("low", prompt=300, max_tokens=5)
    high = first(request("high", prompt=60, max_tokens=5))
    expected = tokens_alone(low)
    rig = Rig(max_num_seqs=1)
    rig.submit(low)
    rig.step(4)
    assert rig.status("low") is Status.PREFILL
    told = list(rig.records["low"].events)
    rig.submit(high)
    rig.step()
    assert rig.status("low") is Status.WAITING
    rig.drain()
    assert rig.records["low"].tokens == expected
    assert [event for event in rig.records["low"].events if isinstance(event, ProgressEvent)] == told
    rig.check_empty()


def test_nobody_gives_way_in_vain() -> None:
    rig = Rig(slot_bytes=pool_of(10))
    rig.submit(
        request("low", prompt=100, max_tokens=20), first(request("same", prompt=300, max_tokens=80), -5)
    )
    rig.step_to("low", Status.DECODE)
    rig.step_to("same", Status.DECODE)
    # What "low" holds and what is free are not enough, and "same" stays.
    rig.submit(first(request("high", prompt=500, max_tokens=50), -5))
    rig.step(3)
    assert rig.engine.stats().preemptions_total == 0
    rig.drain()
    assert rig.engine.stats().requests_failed_total == 0


@contextmanager
def store_process(transport: str, num_slabs: int) -> Iterator[StoreClient]:
    """Attached to a store in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="kvs-", dir="/tmp") as folder:
        target = f"unix:{folder}/s.sock"
        options = [
            f"--listen={target}",
            f"--arena-bytes={num_slabs * SLAB_BYTES}",
            f"--slab-bytes={SLAB_BYTES}",
        ]
        command = [sys.executable, "-m", "kv_store", *options, "--trainers=1", "--runtime=process"]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            client = StoreClient.connect(
                target,
                LAYOUT,
                worker_id="w",
                transport=transport,
                max_gather_rows=512,
                timeout_seconds=PATIENCE,
            )
            yield client
            client.close()
        finally:
            process.kill()
            process.wait(PATIENCE)


@pytest.mark.parametrize("transport", ["zero_copy", pytest.param("grpc", marks=SLOW)])
def test_many_in_a_small_arena_all_end_with_the_answers_of_those_alone(transport: str) -> None:
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
    with store_process(transport, 100) as client:
        rig = Rig(client=client, **options)
        rig.submit(*requests)
        rig.drain(100_000)
        assert [rig.records[one.request_id].tokens for one in requests] == alone
        stats = rig.engine.stats()
        assert stats.requests_failed_total == 0
        assert 0 < stats.preemptions_total <= 3 * len(requests)
        assert client.stats().num_sequences == 0


def test_any_mix_under_pressure_answers_as_alone() -> None:
    """Slots, seats and the arena are short, priorities differ, some are aborted."""
    source, policies = random.Random(8), ["pqcache", "clusterkv", "oracle", "full", "h2o"]
    options = {"policies": every_small_policy(), "max_model_len": 256, "reuses_prefixes": True}
    requests = [
        first(
            request(
                f"r{number}",
                source.choice(policies),
                source.choice([0.3, 30, 1.0]),
                prompt=random_prompt(source.randrange(60, 150), source.randrange(6)),
                max_tokens=source.randrange(1, 60),
            ),
            source.choice([0, 0, 0, -1, 2]),
        )
        for number in range(14)
    ]
    alone = [Rig(**options).tokens(one) for one in requests]
    rig = Rig(max_num_seqs=5, slot_bytes=pool_of(10), capacity_tokens=448, **options)
    aborted = set()
    for one in requests:
        rig.submit(one)
        rig.step(source.randrange(15))
        if source.random() < 0.15:
            gone = source.choice(list(rig.records))
            rig.engine.abort(gone)
            aborted.add(gone)
    rig.drain()
    for one, tokens in zip(requests, alone, strict=True):
        said = rig.records[one.request_id].tokens
        assert said == tokens[: len(said)] if one.request_id in aborted else said == tokens
    assert 2 < rig.engine.stats().preemptions_total < 2 * len(requests)
    assert rig.engine.stats().requests_failed_total == 0
    rig.check_empty()


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


def test_nobody_gives_way_for_a_seat_to_one_that_waits_for_the_arena() -> None:
    rig = Rig(capacity_tokens=192, max_num_seqs=2)
    rig.submit(request("holds", "pqcache", 0.3, prompt=120, max_tokens=60))
    rig.step_to("holds", Status.DECODE)
    rig.submit(request("waits", "pqcache", 0.3, prompt=100, max_tokens=5))
    rig.step()
    rig.submit(first(request("low", prompt=30, max_tokens=20), 1))
    rig.step_to("low", Status.DECODE)
    rig.drain()
    assert rig.engine.stats().preemptions_total == 0
    assert len(rig.records["waits"].tokens) == 5
    rig.check_empty()


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


@pytest.mark.parametrize(
    ("policy", "full_layers"),
    [
        ("full", 0),
        ("pqcache", 1),
        *(pytest.param(*one, marks=SLOW) for one in (("bitkeys", 0), ("clusterkv", 0), ("oracle", 1))),
    ],
)
def test_who_takes_slots_as_it_grows_answers_as_with_all_of_them(policy: str, full_layers: int) -> None:
    one = open_ended("one", policy, context=SHORT)
    # In a longer context the same answer has a limit.
    expected = tokens_alone(one, full_layers=full_layers)
    rig = Rig(full_layers=full_layers, max_model_len=SHORT)
    assert rig.tokens(one) == expected
    rig.check_empty()


def test_what_may_fill_a_context_larger_than_all_slots_is_answered_until_they_are_full() -> None:
    one = open_ended("one")
    rig = Rig(max_model_len=CONTEXT, slot_bytes=pool_of(5))
    record = rig.run(one)[0]
    assert record.complete.finish_reason is FinishReason.LENGTH
    # The last token that is told has no slot yet.
    assert record.tokens == tokens_alone(one)[: 5 * 64 - 60 + 1]
    rig.check_empty()


@pytest.mark.parametrize(("policy", "full_layers"), [("full", 0), ("h2o", 3), ("pqcache", 3)])
def test_the_youngest_gives_way_where_slots_run_out_and_goes_on_with_the_same_tokens(
    policy: str, full_layers: int
) -> None:
    lengths = {"old": 290, "middle": 280, "young": 270}
    requests = [
        request(name, policy, 1.0, prompt=60 + number, max_tokens=length)
        for number, (name, length) in enumerate(lengths.items())
    ]
    alone = [tokens_alone(one, full_layers=full_layers) for one in requests]
    rig = Rig(full_layers=full_layers, slot_bytes=pool_of(15))
    rig.submit(*requests)
    rig.step_until(lambda: rig.engine.stats().preemptions_total)
    assert rig.status("young") is Status.WAITING
    rig.drain()
    assert [rig.records[name].tokens for name in lengths] == alone
    assert rig.engine.stats().requests_failed_total == 0
    rig.check_empty()


@pytest.mark.parametrize(("policy", "full_layers"), [("pqcache", 1), pytest.param("oracle", 0, marks=SLOW)])
def test_resident_answers_that_outgrow_the_slots_go_on_with_the_same_tokens(
    policy: str, full_layers: int
) -> None:
    requests = [open_ended(f"r{number}", policy, 60 + number, SHORT) for number in range(3)]
    alone = [tokens_alone(one, full_layers=full_layers) for one in requests]
    rig = Rig(full_layers=full_layers, max_model_len=SHORT, slot_bytes=pool_of(11))
    rig.run(*requests)
    assert [rig.records[one.request_id].tokens for one in requests] == alone
    assert rig.engine.stats().requests_failed_total == 0
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
