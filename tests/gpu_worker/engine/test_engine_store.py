"""When the store fails, is full, or comes back: who ends, who goes on, and what is left."""

from __future__ import annotations

from engine_rig import TOKEN_BYTES, Rig, request, tokens_alone

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from gpu_worker.errors import CapacityError, StoreUnavailable
from kv_store.client import StoreFull, StoreUnreachable

SELECTING = ["oracle", "pqcache", "clusterkv"]
LEAST = HotCacheSize(tokens=1)


def test_a_request_that_outlived_a_failure_ends_alone_when_the_store_is_new() -> None:
    # "survivor" asks nothing of the store while it is away, but its rows are gone when another attaches anew.
    rig = Rig(prefill_chunk=10)
    rig.store.holds_builds = True
    rig.submit(request("survivor", "pqcache", 0.3, max_tokens=30))
    rig.step_to("survivor", Status.INDEXING)
    rig.store.failure = StoreUnreachable("the store is gone")
    rig.submit(request("first", "oracle", 0.3, max_tokens=30))
    rig.step(3)
    assert isinstance(rig.records["first"].error, StoreUnavailable)
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
