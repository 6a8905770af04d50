"""Decisions of the engine, over a runner of numbers alone."""

from __future__ import annotations

import pytest
from scripted_runner import Decisions

from gpu_worker.engine.request import Status
from gpu_worker.errors import CapacityError, NeverFits, RequestError, StoreUnavailable
from gpu_worker.records import CompleteEvent, ErrorEvent, FinishReason


def reason(run: Decisions, name: str) -> FinishReason:
    last = run.events[name][-1]
    assert isinstance(last, CompleteEvent), last
    return last.finish_reason


def error(run: Decisions, name: str) -> Exception:
    last = run.events[name][-1]
    assert isinstance(last, ErrorEvent), last
    return last.error


def test_a_stream_has_a_token_every_iteration_beside_a_long_prompt() -> None:
    run = Decisions()
    run.submit("stream", max_tokens=100)
    run.engine.step()
    run.submit("long", num_prompt=2000, max_tokens=2)
    before = len(run.tokens("stream"))
    for count in range(1, 6):
        run.engine.step()
        assert len(run.tokens("stream")) == before + count
    # 24 ms of an iteration are two quanta of 10 ms.
    assert run.times("run_quantum").count(("long",)) == 10
    run.run()
    assert run.tokens("long") == [1, 2]
    assert run.tokens("stream") == [*range(1, 101)]


def test_short_prompts_join_one_pass_and_a_long_one_has_its_own() -> None:
    run = Decisions()
    for name, length in (("a", 30), ("b", 40), ("c", 20), ("long", 300)):
        run.submit(name, num_prompt=length)
    run.run()
    assert ("a", "b", "c") in [tuple(sorted(names)) for names in run.times("begin_prompts")]
    assert ("long",) in run.times("begin_prompts")


def test_where_slots_run_out_the_youngest_waits_and_loses_no_token() -> None:
    run = Decisions(slots=120)
    for name in ("old", "young"):
        run.submit(name, num_prompt=40, max_tokens=40)
        run.engine.step()
    run.run()
    assert run.times("preempt")
    assert {*run.times("preempt")} == {("young",)}
    assert [run.tokens(name) for name in ("old", "young")] == [[*range(1, 41)]] * 2
    assert run.engine.stats().preemptions_total == len(run.times("preempt"))


def test_one_that_alone_fills_the_slots_ends_at_its_length() -> None:
    run = Decisions(slots=60)
    run.submit("one", num_prompt=40, max_tokens=100)
    run.run()
    assert reason(run, "one") is FinishReason.LENGTH
    # The token after the last slot needs none.
    assert run.tokens("one") == [*range(1, 22)]
    run.submit("more", num_prompt=61)
    run.run()
    assert isinstance(error(run, "more"), NeverFits)


def test_where_the_arena_is_full_the_lowest_priority_gives_its_room() -> None:
    run = Decisions(arena=130)
    run.submit("low", num_prompt=50, max_tokens=30, policy="recalls", priority=1)
    run.engine.step()
    run.submit("dense", num_prompt=50, max_tokens=30, priority=1)
    run.submit("high", num_prompt=60, max_tokens=30, policy="recalls")
    run.run()
    assert {*run.times("preempt")} == {("low",)}
    assert all(len(run.tokens(name)) == 30 for name in ("low", "high", "dense"))


def test_a_waiting_request_of_higher_priority_takes_a_seat_and_equal_ones_wait() -> None:
    run = Decisions(max_num_seqs=1)
    run.submit("usual", max_tokens=50)
    run.engine.step()
    run.submit("alike", max_tokens=2)
    run.engine.step()
    assert run.status("alike") is Status.WAITING
    run.submit("high", max_tokens=2, priority=-1)
    run.run()
    assert run.times("preempt") == [("usual",)]
    assert run.times("end")[0] == ("high",)
    assert [len(run.tokens(name)) for name in ("usual", "alike")] == [50, 2]


def test_a_request_that_waits_for_the_arena_is_overtaken_by_those_that_need_none() -> None:
    run = Decisions(arena=100)
    run.submit("holds", num_prompt=60, max_tokens=20, policy="recalls")
    run.engine.step()
    run.submit("waits", num_prompt=60, max_tokens=2, policy="recalls")
    run.submit("dense", num_prompt=60, max_tokens=2)
    for _ in range(4):
        run.engine.step()
    assert run.status("waits") is Status.WAITING
    assert run.status("dense") is Status.FINISHED
    # It is not asked for again until the one that holds room has ended.
    assert run.times("admit").count(("waits",)) == 0
    run.run()
    assert run.tokens("waits") == [1, 2]


def test_while_the_store_is_silent_the_others_continue_and_the_wait_ends() -> None:
    run = Decisions()
    run.submit("recalls", max_tokens=50, policy="recalls")
    run.submit("dense", max_tokens=50)
    for _ in range(5):
        run.engine.step()
    run.submit("late", policy="recalls")
    run.runner.silent_seconds = 1.0
    before = {name: len(run.tokens(name)) for name in ("recalls", "dense")}
    for _ in range(10):
        run.engine.step()
    assert len(run.tokens("recalls")) == before["recalls"]
    assert len(run.tokens("dense")) == before["dense"] + 10
    run.clock.now = 11.0
    run.engine.check_store()
    for name in ("recalls", "late"):
        assert isinstance(error(run, name), StoreUnavailable)
    run.run()
    assert len(run.tokens("dense")) == 50


def test_a_store_that_answers_again_has_cost_no_token() -> None:
    run = Decisions()
    run.submit("recalls", max_tokens=30, policy="recalls")
    for _ in range(5):
        run.engine.step()
    run.runner.silent_seconds = 1.0
    for _ in range(5):
        run.engine.step()
    run.runner.silent_seconds = 0.0
    run.clock.now = 3.0
    run.run()
    assert run.tokens("recalls") == [*range(1, 31)]
    assert sum(run.engine.stats().decode_stall_seconds["store"].counts) == 1


def test_what_an_earlier_store_held_ends_with_an_error_and_nothing_else_does() -> None:
    run = Decisions()
    run.submit("recalls", max_tokens=20, policy="recalls")
    run.submit("dense", max_tokens=20)
    for _ in range(4):
        run.engine.step()
    run.runner.lost = ("recalls",)
    run.engine.check_store()
    assert isinstance(error(run, "recalls"), StoreUnavailable)
    run.run()
    assert len(run.tokens("dense")) == 20


def test_a_step_that_fails_for_one_ends_that_one_alone() -> None:
    run = Decisions()
    for name in ("fails", "goes on"):
        run.submit(name, max_tokens=10)
    for _ in range(3):
        run.engine.step()
    run.runner.fails["fails"] = CapacityError("no room")
    run.run()
    assert isinstance(error(run, "fails"), CapacityError)
    assert len(run.tokens("goes on")) == 10


@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
def test_an_abort_releases_what_a_request_holds_at_any_time(num_steps: int) -> None:
    run = Decisions()
    run.submit("one", num_prompt=700, max_tokens=20, policy="recalls")
    for _ in range(num_steps):
        run.engine.step()
    run.engine.abort("one")
    assert reason(run, "one") is FinishReason.ABORT
    assert not run.runner.places
    assert not run.engine.has_work
    run.engine.abort("one")


def test_requests_beyond_the_seats_wait_for_their_turn() -> None:
    run = Decisions(max_num_seqs=2)
    names = [f"r{number}" for number in range(7)]
    for number, name in enumerate(names):
        run.submit(name, num_prompt=40 + number, max_tokens=9)
    most = 0
    while run.engine.has_work:
        run.engine.step()
        most = max(most, run.engine.stats().running)
    assert most == 2
    assert run.times("admit") == [(name,) for name in names]
    assert all(run.tokens(name) == [*range(1, 10)] for name in names)


def test_an_id_in_use_is_refused_until_it_is_free() -> None:
    run = Decisions()
    run.submit("same")
    with pytest.raises(RequestError, match="same"):
        run.submit("same")
    run.run()
    run.submit("same")
    run.run()
    assert run.tokens("same") == [*range(1, 6)]


def test_closing_ends_every_request() -> None:
    run = Decisions(max_num_seqs=2)
    for name in ("one", "two", "waits"):
        run.submit(name, max_tokens=50)
    run.engine.step()
    run.engine.close()
    assert all(reason(run, name) is FinishReason.ABORT for name in run.events)
    assert not run.runner.places
    assert not run.engine.has_work


def test_no_request_is_preempted_in_vain() -> None:
    run = Decisions(slots=600)
    run.submit("low", num_prompt=100, max_tokens=30)
    run.submit("same", num_prompt=300, max_tokens=30, priority=-5)
    for _ in range(4):
        run.engine.step()
    # The slots of "low" and the free ones are too few, and "same" is as important.
    run.submit("high", num_prompt=500, max_tokens=2, priority=-5)
    for _ in range(3):
        run.engine.step()
    assert run.times("preempt") == []
    run.run()
    assert run.tokens("high") == [1, 2]


def test_no_seat_is_taken_for_a_request_that_waits_for_the_arena() -> None:
    run = Decisions(max_num_seqs=2, arena=100)
    run.submit("holds", num_prompt=60, max_tokens=20, policy="recalls")
    run.engine.step()
    run.submit("waits", num_prompt=60, max_tokens=2, policy="recalls")
    run.submit("low", num_prompt=30, max_tokens=20, priority=1)
    run.run()
    assert run.times("preempt") == []
    assert run.tokens("waits") == [1, 2]
