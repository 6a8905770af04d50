"""A store that fails, is full, or comes back: requests that end, requests that go on, and what is left."""

from __future__ import annotations

import pytest
from engine_rig import LAYOUT, TOKEN_BYTES, Rig, random_prompt, request, tokens_alone
from offload_rig import attached

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from gpu_worker.errors import CapacityError, StoreUnavailable
from kv_store.client import StoreFull, StoreSilent, StoreUnreachable

LEAST = HotCacheSize(tokens=1)


def test_a_request_that_outlived_a_failure_ends_alone_when_the_store_is_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # "survivor" asks nothing of the store while it is away, but its rows are gone when another attaches anew.
    rig = Rig(prefill_chunk=10)
    rig.store.holds_builds = True
    rig.submit(request("survivor", "pqcache", 0.3, max_tokens=30))
    rig.step_to("survivor", Status.INDEXING)
    rig.store.failure = StoreUnreachable("the store is gone")
    rig.submit(request("first", "oracle", 0.3, max_tokens=30))
    rig.step(3)
    assert isinstance(rig.records["first"].error, StoreUnavailable)
    # The client's text may name sockets: it is for the log.
    assert "the store is gone" in caplog.text
    rig.store.failure = None
    second = request("second", "oracle", 0.3, max_tokens=60)
    third = request("third", "clusterkv", 0.3, max_tokens=60)
    rig.submit(second)
    rig.step_to("second", Status.DECODE, 5)
    rig.store.finish_builds()
    rig.store.holds_builds = False
    rig.step(3)
    assert isinstance(rig.records["survivor"].error, StoreUnavailable)
    # Its end says nothing of the store that the others use.
    assert rig.engine.stats().store_reachable
    rig.submit(third)
    rig.drain()
    assert rig.store.num_attached == 2
    assert rig.records["second"].tokens == tokens_alone(second)
    assert rig.records["third"].tokens == tokens_alone(third)
    rig.check_empty()


def test_a_store_that_is_too_small_refuses_and_names_the_missing_bytes() -> None:
    rig = Rig(capacity_tokens=128)
    # 121 tokens are two slabs of 64, 129 are three.
    assert len(rig.run(request("fits", "pqcache", 0.3, max_tokens=5))[0].tokens) == 5
    error = rig.run(request("long", "pqcache", 0.3, prompt=128))[0].error
    assert isinstance(error, CapacityError)
    assert f"{64 * TOKEN_BYTES // 3} bytes" in str(error)
    assert len(rig.run(request("full", prompt=200, max_tokens=5))[0].tokens) == 5
    rig.check_empty()


def test_an_index_that_cannot_be_placed_ends_its_request() -> None:
    rig = Rig()
    rig.store.holds_builds = True
    rig.submit(request("one", "pqcache", 0.3), request("full", max_tokens=30))
    rig.step_to("one", Status.INDEXING)
    for held, _ in rig.store.held_builds:
        held.set_exception(StoreFull("77 bytes are missing"))
    rig.drain()
    assert isinstance(rig.records["one"].error, CapacityError)
    assert "77 bytes" in str(rig.records["one"].error)
    assert len(rig.records["full"].tokens) == 30
    rig.check_empty()


def test_a_window_that_cannot_be_trained_ends_its_request_only() -> None:
    rig = Rig()
    rig.submit(request("one", "clusterkv", 0.3, max_tokens=80), request("two", "pqcache", 0.3, max_tokens=80))
    rig.step_to("two", Status.DECODE, 5)

    def refuse(*arguments: object, **options: object) -> None:
        raise StoreFull("no room")

    rig.store.build_index = refuse  # type: ignore[method-assign,assignment]
    rig.drain()
    assert isinstance(rig.records["one"].error, CapacityError)
    assert len(rig.records["one"].tokens) == 41
    assert rig.records["two"].tokens == tokens_alone(request("two", "pqcache", 0.3, max_tokens=80))
    rig.check_empty()


def test_a_store_that_begins_a_sequence_and_does_not_say_so_is_asked_again() -> None:
    one, rig = request("one", "pqcache", 0.3), Rig()
    begin, answers = rig.store.begin, iter((False, True))

    def once_silent(name: str, *arguments: object, **options: object) -> object:
        begun = begin(name, *arguments, **options)  # type: ignore[arg-type]
        if not next(answers, True):
            rig.store.end(name)
            raise StoreSilent("no answer to this one")
        return begun

    rig.store.begin = once_silent  # type: ignore[method-assign,assignment]
    assert rig.run(one)[0].tokens == tokens_alone(one)
    rig.check_empty()


def test_nobody_reaches_its_length_because_others_read_a_prefix() -> None:
    document = random_prompt(160, 1)
    one = request("one", "oracle", 0.3, prompt=random_prompt(150, 2), max_tokens=30)
    readers = [
        request(f"reader {seed}", prompt=(*document, *random_prompt(60, seed)), max_tokens=2)
        for seed in range(4)
    ]
    # An arena of 320 tokens, half of which the document fills: a slab has 16 tokens of one of three layers.
    with attached(LAYOUT, num_slabs=60) as (_, client):
        rig = Rig(client=client, reuses_prefixes=True, prefill_chunk=16, hot_cache=LEAST)
        rig.run(request("document", prompt=document, max_tokens=1))
        rig.submit(one)
        rig.step_to("one", Status.DECODE)
        rig.submit(*readers)
        rig.drain()
        answers = {name: record.tokens for name, record in rig.records.items()}
        assert all(answers[each.request_id] == tokens_alone(each) for each in (one, *readers))
        assert rig.engine.stats().cached_tokens_total > 0
        assert not rig.runner.offloader.extents
