"""An idle engine's view of a store that stops and comes back."""

from __future__ import annotations

import time

import pytest
from engine_rig import Rig, request, tokens_alone
from offload_rig import FULL, attached, make_sequence
from test_offload import make_offloader, prefill
from waiting import PATIENCE, wait_until

from gpu_worker.engine.request import Status
from gpu_worker.errors import StoreUnavailable
from kv_store.client import StaleEpoch, StoreUnreachable


def test_an_idle_engine_sees_the_store_go_and_attaches_to_the_next_one() -> None:
    rig = Rig()
    rig.engine.check_store()
    assert rig.engine.stats().store_reachable
    assert rig.store.num_attached == 1
    rig.store.failure = StoreUnreachable("the store is gone")
    rig.engine.check_store()
    assert not rig.engine.stats().store_reachable
    assert rig.store.num_attached == 1
    rig.store.failure = None
    rig.engine.check_store()
    assert rig.engine.stats().store_reachable
    assert rig.store.num_attached == 2
    one = request("one", "pqcache", 0.3)
    assert rig.run(one)[0].tokens == tokens_alone(one)
    assert rig.store.num_attached == 2
    rig.check_empty()


def test_a_new_store_ends_whoever_recalled_from_the_old_one_without_another_request() -> None:
    rig = Rig()
    rig.submit(request("recalls", "pqcache", 0.3, max_tokens=60), request("full", max_tokens=30))
    rig.step_to("recalls", Status.DECODE, 3)
    # the heartbeat's news
    rig.store.lost = StaleEpoch("restarted")
    rig.engine.check_store()
    assert isinstance(rig.records["recalls"].error, StoreUnavailable)
    assert rig.engine.stats().store_reachable
    rig.drain()
    assert len(rig.records["full"].tokens) == 30
    rig.check_empty()


def test_a_moment_of_silence_costs_a_running_request_nothing() -> None:
    rig = Rig()
    one = request("one", "pqcache", 0.3, max_tokens=60)
    rig.submit(one)
    rig.step_to("one", Status.DECODE, 3)
    rig.store.lost = StoreUnreachable("no answer to one beat")
    rig.engine.check_store()
    assert not rig.engine.stats().store_reachable
    rig.store.lost = None
    rig.engine.check_store()
    assert rig.engine.stats().store_reachable
    rig.drain()
    assert rig.records["one"].tokens == tokens_alone(one)
    assert rig.store.num_attached == 1


def test_a_store_that_goes_again_while_one_attaches_is_attached_to_later() -> None:
    rig = Rig()
    rig.store.failure = StoreUnreachable("the store is gone")
    rig.engine.check_store()
    rig.store.failure = StaleEpoch("answers, and goes again")
    rig.engine.check_store()
    assert not rig.engine.stats().store_reachable
    rig.store.failure = None
    rig.engine.check_store()
    assert rig.engine.stats().store_reachable


def test_an_idle_worker_lets_a_dead_stores_memory_go_and_never_waits_for_it() -> None:
    with attached(FULL, timeout_seconds=600.0) as (store, client):
        offloader = make_offloader(client)
        sequence = make_sequence("a", 0, 40)
        prefill(offloader, sequence)
        store.server.close()
        wait_until(lambda: not offloader.link.is_reachable)
        # somebody may read there still
        assert not offloader.extents.renew()
        assert offloader.arena.view is not None
        offloader.extents.release(sequence)
        assert not offloader.extents.renew()
        assert offloader.arena.view is None
        assert client.arena.size == 0
        # far less than the time that attaching would wait
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable):
            offloader.extents.open(make_sequence("b", 1, 40), 41)
        assert time.monotonic() - begun < PATIENCE
        offloader.close()
