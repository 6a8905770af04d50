"""A store that is there and does not answer: who waits for it, who goes on, and what is left."""

from __future__ import annotations

import pytest
from engine_rig import Rig, make_model, random_prompt, request, tokens_alone
from naive_decoder import greedy

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.patience import PATIENCE_SECONDS
from gpu_worker.engine.request import Status
from gpu_worker.errors import StoreSilent, StoreUnavailable
from kv_store.client import StoreSilent as NoAnswer
from kv_store.client import StoreUnreachable

LEAST = HotCacheSize(tokens=1)
STAGES = [Status.WAITING, Status.PREFILL, Status.INDEXING, Status.DECODE]
FULL = request("full", max_tokens=60)
# Its rows fill a slab more after 8 tokens.
RECALLS = request("recalls", "pqcache", 0.3, max_tokens=40)


def silenced(stage: Status) -> Rig:
    """A dense request decodes, another has come so far, and the store is silent."""
    rig = Rig(prefill_chunk=20, hot_cache=LEAST)
    rig.submit(FULL)
    rig.step_to("full", Status.DECODE, 4)
    rig.store.holds_builds = stage is Status.INDEXING
    if stage is not Status.WAITING:
        rig.submit(RECALLS)
        rig.step_to("recalls", stage, 3 if stage is Status.DECODE else 0)
    rig.store.failure = NoAnswer("the store is stopped")
    if stage is Status.WAITING:
        rig.submit(RECALLS)
    return rig


def go_on_without(rig: Rig) -> None:
    """The dense request ends as ever, while the other waits."""
    rig.step_until(lambda: rig.records["full"].is_over)
    assert rig.records["full"].tokens == greedy(make_model(), random_prompt(120), 60)[0]
    rig.engine.check_store()
    assert not rig.engine.stats().store_reachable
    assert not rig.records["recalls"].is_over


@pytest.mark.parametrize("stage", STAGES)
def test_a_silent_store_is_waited_for_by_those_that_need_it_only(stage: Status) -> None:
    rig = silenced(stage)
    go_on_without(rig)
    # Nothing to do but wait: the thread may sleep.
    assert not any(rig.engine.step() for _ in range(5))
    rig.store.failure = None
    rig.store.finish_builds()
    rig.store.holds_builds = False
    rig.engine.check_store()
    assert rig.engine.stats().store_reachable
    rig.drain()
    assert rig.records["recalls"].tokens == tokens_alone(RECALLS)
    stalls = rig.engine.stats().decode_stall_seconds
    assert sum(stalls["store"].counts) == (stage is Status.DECODE)
    assert sum(stalls["index"].counts) == (stage is Status.INDEXING)
    # Nothing of it was lost: the attachment is the same.
    assert rig.store.num_attached == 1
    rig.check_empty()


@pytest.mark.parametrize("stage", STAGES)
def test_who_waits_too_long_ends_and_is_released_once_the_store_answers(stage: Status) -> None:
    rig = silenced(stage)
    go_on_without(rig)
    rig.store.silent_for = PATIENCE_SECONDS
    rig.engine.check_store()
    error = rig.records["recalls"].error
    assert isinstance(error, StoreUnavailable)
    assert not isinstance(error, StoreSilent)
    assert "did not answer for" in str(error)
    assert not rig.engine.has_work
    held = set(rig.store.rows)
    assert held == (set() if stage is Status.WAITING else {"recalls"})
    rig.store.failure = None
    rig.engine.check_store()
    rig.check_empty()
    rig.store.holds_builds = False
    again = request("again", "pqcache", 0.3)
    assert rig.run(again)[0].tokens == tokens_alone(again)
    assert rig.store.num_attached == 1


@pytest.mark.parametrize("is_lease_lost", [False, True])
def test_who_has_every_row_on_the_device_goes_on_without_the_store(is_lease_lost: bool) -> None:
    rig = Rig()
    clusters = request("clusters", "clusterkv", 0.3, max_tokens=80)
    rig.submit(RECALLS, clusters)
    rig.step_to("clusters", Status.DECODE, 3)
    assert not rig.sequence("recalls").can_miss
    rig.store.failure = NoAnswer("the store is stopped")
    if is_lease_lost:
        rig.store.lost = StoreUnreachable("silent for a lease")
    rig.step_until(lambda: rig.records["recalls"].is_over)
    assert rig.records["recalls"].tokens == tokens_alone(RECALLS)
    assert rig.engine.stats().fallbacks_total["without_store"] == 1
    # The store trains what leaves this one's window.
    rig.step(100)
    assert len(rig.records["clusters"].tokens) < 80
    assert set(rig.store.rows) == {"recalls", "clusters"}
    rig.store.failure = rig.store.lost = None
    rig.engine.check_store()
    rig.drain()
    if is_lease_lost:
        assert isinstance(rig.records["clusters"].error, StoreUnavailable)
    else:
        assert rig.records["clusters"].tokens == tokens_alone(clusters)
    rig.check_empty()


def test_who_comes_later_waits_no_longer_although_the_room_of_others_is_not_free_yet() -> None:
    rig = silenced(Status.INDEXING)
    go_on_without(rig)
    for held, _ in rig.store.held_builds:
        held.set_running_or_notify_cancel()
    rig.store.silent_for = PATIENCE_SECONDS
    rig.engine.check_store()
    assert rig.records["recalls"].is_over
    # Its indexes are still being trained, and the store says no more of it.
    rig.submit(request("later", "pqcache", 0.3))
    rig.step()
    rig.engine.check_store()
    assert "did not answer for" in str(rig.records["later"].error)


def test_a_store_that_begins_a_sequence_and_does_not_say_so_is_asked_again() -> None:
    rig = Rig()
    begin, answers = rig.store.begin, iter((False, True))

    def once_silent(name: str, *arguments: object, **options: object) -> object:
        begun = begin(name, *arguments, **options)  # type: ignore[arg-type]
        if not next(answers, True):
            rig.store.end(name)
            raise NoAnswer("no answer to this one")
        return begun

    rig.store.begin = once_silent  # type: ignore[method-assign,assignment]
    assert rig.run(RECALLS)[0].tokens == tokens_alone(RECALLS)
    rig.check_empty()


def test_an_abort_while_the_store_is_silent_is_done_there_later() -> None:
    rig = silenced(Status.DECODE)
    rig.engine.abort("recalls")
    assert rig.records["recalls"].is_over
    assert rig.store.rows
    rig.drain()
    rig.store.failure = None
    rig.engine.check_store()
    rig.check_empty()


def test_others_decode_while_tokens_that_leave_a_window_are_trained() -> None:
    rig = Rig()
    leaves = request("leaves", "clusterkv", 0.3, max_tokens=80)
    rig.submit(leaves, FULL)
    rig.step_to("leaves", Status.DECODE, 5)
    rig.store.holds_builds = True
    rig.step_until(lambda: rig.store.held_builds)
    told = len(rig.records["leaves"].tokens)
    rig.step_until(lambda: rig.records["full"].is_over)
    assert len(rig.records["leaves"].tokens) == told
    rig.store.finish_builds()
    rig.store.holds_builds = False
    rig.drain()
    assert rig.records["leaves"].tokens == tokens_alone(leaves)
    assert sum(rig.engine.stats().decode_stall_seconds["index"].counts) > 0
    rig.check_empty()


def test_an_abort_while_a_window_is_trained_leaves_nothing() -> None:
    rig = Rig()
    rig.submit(request("leaves", "clusterkv", 0.3, max_tokens=80))
    rig.step_to("leaves", Status.DECODE, 5)
    rig.store.holds_builds = True
    rig.step_until(lambda: rig.store.held_builds)
    rig.engine.abort("leaves")
    rig.store.held_builds.clear()
    rig.store.holds_builds = False
    again = request("leaves", "clusterkv", 0.3, max_tokens=80)
    assert rig.run(again)[0].tokens == tokens_alone(again)
    rig.check_empty()
