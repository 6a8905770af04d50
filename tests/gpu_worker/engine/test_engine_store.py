"""When the store fails, is full, or comes back: who ends, who goes on, and what is left."""

from __future__ import annotations

import pytest
from engine_rig import TOKEN_BYTES, Rig, make_model, random_prompt, request, tokens_alone
from naive_decoder import greedy
from strict_store import StrictStore

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from gpu_worker.errors import CapacityError, StoreUnavailable
from kv_store.client import StaleEpoch, StoreFull, StoreUnreachable

SELECTING = ["oracle", "pqcache", "clusterkv"]
LEAST = HotCacheSize(tokens=1)


@pytest.mark.parametrize("policy", SELECTING)
@pytest.mark.parametrize("stage", [Status.WAITING, Status.PREFILL, Status.INDEXING, Status.DECODE])
def test_a_lost_store_ends_those_that_offload_and_nobody_else(
    stage: Status, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(prefill_chunk=20, hot_cache=LEAST)
    full = request("full", max_tokens=60)
    rig.submit(full)
    rig.step_to("full", Status.DECODE, 4)
    if stage is not Status.WAITING:
        rig.store.holds_builds = stage is Status.INDEXING and policy != "oracle"
        rig.submit(request("victim", policy, 0.3, max_tokens=40))
        wanted = Status.DECODE if stage is Status.INDEXING and policy == "oracle" else stage
        rig.step_to("victim", wanted, 3 if wanted is Status.DECODE else 0)
    rig.store.failure = StoreUnreachable("the store is gone")
    if stage is Status.WAITING:
        rig.submit(request("victim", policy, 0.3, max_tokens=40))
    rig.store.finish_builds()
    rig.drain()
    error = rig.records["victim"].error
    assert isinstance(error, StoreUnavailable)
    # What the client says may name sockets: it is for the log.
    assert "the store is gone" not in str(error)
    assert "the store is gone" in caplog.text
    assert rig.records["full"].tokens == greedy(make_model(), random_prompt(120), 60)[0]
    stats = rig.engine.stats()
    assert not stats.store_reachable
    assert (stats.requests_failed_total, stats.requests_finished_total) == (1, 1)
    # The store answers again: the next request attaches anew.
    rig.store.failure = None
    rig.store.holds_builds = False
    again = rig.run(request("again", policy, 0.3, max_tokens=10))[0]
    assert again.tokens == tokens_alone(request("again", policy, 0.3, max_tokens=10))
    assert rig.engine.stats().store_reachable
    rig.check_empty()


def test_every_offloading_request_of_a_batch_ends_and_full_ones_go_on() -> None:
    rig = Rig(hot_cache=LEAST)
    requests = [
        request(f"{p} {n}", p, 0.3, prompt=90 + n, max_tokens=50) for n in range(2) for p in SELECTING
    ]
    rig.submit(*requests, request("full", max_tokens=50))
    rig.step_to("full", Status.DECODE, 2)
    rig.store.failure = StoreUnreachable("the store is gone")
    rig.step()
    for one in requests:
        assert isinstance(rig.records[one.request_id].error, StoreUnavailable)
    rig.drain()
    assert rig.records["full"].tokens == greedy(make_model(), random_prompt(120), 50)[0]


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


def test_a_full_store_is_waited_for_while_another_request_will_free_room() -> None:
    rig = Rig(capacity_tokens=192)
    rig.submit(
        request("holds", "pqcache", 0.3, max_tokens=20),
        request("waits", "clusterkv", 0.3, max_tokens=6),
        request("behind", prompt=30, max_tokens=6),
    )
    rig.step_to("holds", Status.DECODE, 10)
    # What needs no store is shorter, and overtakes it.
    assert (rig.engine.stats().running, rig.engine.stats().waiting) == (1, 1)
    assert not rig.records["waits"].events
    rig.drain()
    assert rig.records["waits"].tokens == tokens_alone(request("w", "clusterkv", 0.3, max_tokens=6))
    assert len(rig.records["behind"].tokens) == 6
    rig.check_empty()


def test_a_request_that_waits_for_the_store_can_be_aborted() -> None:
    rig = Rig(capacity_tokens=192)
    rig.submit(
        request("holds", "pqcache", 0.3, max_tokens=20), request("waits", "clusterkv", 0.3, max_tokens=6)
    )
    rig.step_to("holds", Status.DECODE, 10)
    rig.engine.abort("waits")
    rig.drain()
    assert len(rig.records["holds"].tokens) == 20
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


def restart(store: StrictStore) -> None:
    """Every call is refused until the client attaches anew."""
    store.failure = StaleEpoch("the store was restarted")
    reattach = store.reattach

    def attach_to_the_new_one() -> None:
        store.failure = None
        reattach()

    store.reattach = attach_to_the_new_one  # type: ignore[method-assign]


def test_a_request_that_comes_after_a_restart_has_lost_nothing() -> None:
    rig = Rig()
    running = request("running", "pqcache", 0.3, max_tokens=60)
    rig.submit(running)
    rig.step_to("running", Status.DECODE, 3)
    restart(rig.store)
    one = request("one", "pqcache", 0.3)
    record = rig.run(one)[0]
    assert record.tokens == tokens_alone(one)
    assert isinstance(rig.records["running"].error, StoreUnavailable)
    assert rig.engine.stats().store_reachable
    rig.check_empty()


@pytest.mark.parametrize("lost", [StaleEpoch("restarted"), StoreUnreachable("silent for a lease")])
def test_no_index_is_waited_for_or_taken_once_the_lease_is_lost(lost: Exception) -> None:
    rig = Rig()
    rig.store.holds_builds = True
    rig.submit(request("waits", "pqcache", 0.3), request("full", max_tokens=30))
    rig.step_to("waits", Status.INDEXING)
    rig.store.lost = lost
    rig.step(2)
    assert isinstance(rig.records["waits"].error, StoreUnavailable)
    rig.drain()
    assert len(rig.records["full"].tokens) == 30
    rig.check_empty()


def test_a_window_is_not_waited_for_once_the_lease_is_lost() -> None:
    rig = Rig()
    rig.submit(request("one", "clusterkv", 0.3, max_tokens=80), request("full", max_tokens=60))
    rig.step_to("one", Status.DECODE, 5)
    # The window's index never comes, and nobody says so but the heartbeat.
    rig.store.holds_builds = True
    rig.store.lost = StoreUnreachable("silent for a lease")
    rig.drain()
    assert isinstance(rig.records["one"].error, StoreUnavailable)
    assert len(rig.records["full"].tokens) == 60
    rig.check_empty()
