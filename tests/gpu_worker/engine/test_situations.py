"""One matrix of situations and policies: answers are those of the same requests alone, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from engine_rig import (
    NUM_LAYERS,
    Rig,
    every_small_policy,
    mixed_requests,
    pool_of,
    random_prompt,
    request,
)
from strict_store import StrictStore

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.patience import PATIENCE_SECONDS
from gpu_worker.engine.request import Status
from gpu_worker.errors import InvalidLogits, StoreUnavailable
from gpu_worker.records import Budget, GenerationRequest, ProgressEvent
from kv_store.client import StaleEpoch, StoreSilent, StoreUnreachable

RECALL = ("oracle", "pqcache", "clusterkv", "bitkeys")
RETAIN = ("streaming_llm", "snapkv", "h2o", "chelsea", "scissorhands")
# The store trains their indexes; without slots for all of its rows none goes on without the store.
TRAINED, STORED = ("pqcache", "clusterkv"), ("oracle", "pqcache", "clusterkv")
# Each way to keep, select, evict and compress again; random schedules try the others.
EVERY = ("full", *STORED, "snapkv", "h2o", "chelsea")
# Scores of prompts need queries that others do: of all tokens, or of a last window.
CACHED = {"h2o": 0, "scissorhands": 64}
LEAST = {"hot_cache": HotCacheSize(tokens=1)}
POISON = 96

Failed = Mapping[str, type[Exception]] | None
Happens = Callable[[Rig, GenerationRequest], Failed]
CASES: list[Any] = []


def add_case(happens: Happens, policy: str, options: dict[str, Any], *name: str) -> None:
    # One process answers a policy's requests alone, each once.
    group = pytest.mark.xdist_group(f"situations of {policy}")
    CASES.append(pytest.param(happens, policy, options, marks=group, id=" ".join((*name, policy, *options))))


def situation(policies: tuple[str, ...], *options: dict[str, Any]) -> Callable[[Happens], Happens]:
    """Enter a situation in the matrix: for each of the policies, and for each of these options of the rig."""

    def enter(happens: Happens) -> Happens:
        for each in options or ({},):
            for policy in policies:
                add_case(happens, policy, each, happens.__name__)
        return happens

    return enter


def asked(
    name: str, policy: str = "full", prompt: int = 90, max_tokens: int = 40, **more: Any
) -> GenerationRequest:
    """Return a request that draws its tokens, and is penalised for those that it has."""
    made = request(name, policy, 36, prompt=tuple(token % 85 for token in random_prompt(prompt, len(name))))
    sampling = replace(
        made.sampling,
        max_tokens=max_tokens,
        temperature=0.8,
        seed=prompt,
        frequency_penalty=0.3,
        logit_bias=((POISON, -100.0),),
    )
    return replace(made, sampling=sampling, **more)


def longer(one: GenerationRequest, prompt: int, max_tokens: int, **more: Any) -> GenerationRequest:
    return asked(one.request_id, one.policy, prompt, max_tokens, **more)


def begun(rig: Rig, one: GenerationRequest, status: Status = Status.DECODE) -> None:
    """Submit a request and step until it is there, in mid-answer where it decodes."""
    rig.submit(one)
    rig.step_to(one.request_id, status, 5 if status is Status.DECODE else 0)


def over(rig: Rig, *names: str) -> None:
    rig.step_until(lambda: all(rig.records[name].is_over for name in names))


# Others.


@situation(EVERY, {"prefill_chunk": 7})
def in_small_quanta(rig: Rig, one: GenerationRequest) -> None:
    rig.submit(one)


@situation(("full",), {}, LEAST, {"full_layers": 1, "trains_indexes": True}, {"trains_indexes": True} | LEAST)
def beside_all_others(rig: Rig, one: GenerationRequest) -> None:
    rig.submit(one, *mixed_requests(), *(asked(policy, policy, 130) for policy in RETAIN))


@situation(("full",), {"max_num_seqs": 4, "prefill_chunk": 37} | LEAST)
def beside_others_that_come_and_go(rig: Rig, one: GenerationRequest) -> None:
    rig.submit(one)
    for number, policy in enumerate((*RECALL, *RETAIN)):
        rig.submit(asked(policy, policy, 60 + number, 1 + number))
        rig.step(3)
        if number % 2:
            rig.engine.abort(policy)


@situation(EVERY, {"stretch": 1e6})
def after_a_prompt_that_it_overtakes(rig: Rig, one: GenerationRequest) -> None:
    begun(rig, asked("long", one.policy, 900, 6), Status.PREFILL)
    rig.submit(longer(one, 50, 6))
    over(rig, "one")
    assert rig.status("long") is Status.PREFILL


@situation(RECALL, LEAST)
@situation(TRAINED, {"hot_cache": HotCacheSize(share=0.4)})
def with_a_hot_cache_of_a_size(rig: Rig, one: GenerationRequest) -> None:
    rig.run(one)
    assert (rig.records["one"].usage.hit_rate < 1) is (one.policy != "oracle")


@situation(("full", "pqcache"), {"max_num_seqs": 2, "prefill_chunk": 20})
def beside_one_that_is_aborted_while_it_waits(rig: Rig, one: GenerationRequest) -> None:
    begun(rig, asked("other", "oracle"))
    begun(rig, asked("more"))
    rig.submit(one)
    rig.step(2)
    rig.engine.abort("one")
    usage = rig.records["one"].usage
    assert (usage.device_bytes, usage.host_bytes) == (0, 0)


def abort(rig: Rig, one: GenerationRequest, status: Status) -> None:
    begun(rig, asked("other", "oracle"))
    begun(rig, one, status)
    # In the last of three layers, where indexes of those before it are there.
    rig.step({Status.PREFILL: 14, Status.INDEXING: 3}.get(status, 0))
    assert rig.status("one") is status
    num_tokens = len(rig.records["one"].tokens)
    rig.engine.abort("one")
    rig.engine.abort("one")
    assert rig.records["one"].usage.completion_tokens == num_tokens
    assert rig.engine.stats().requests_aborted_total == 1
    assert "one" not in rig.store.rows
    # Its seat and slots serve the next one.
    rig.submit(replace(one, request_id="next"))


@situation(EVERY, {"max_num_seqs": 2, "prefill_chunk": 20})
def beside_one_that_is_aborted_in_its_prompt(rig: Rig, one: GenerationRequest) -> None:
    abort(rig, one, Status.PREFILL)


@situation(TRAINED, {"max_num_seqs": 2})
def beside_one_that_is_aborted_while_its_index_is_trained(rig: Rig, one: GenerationRequest) -> None:
    rig.store.holds_builds = True
    abort(rig, one, Status.INDEXING)
    rig.store.finish_builds()
    rig.store.holds_builds = False


@situation(EVERY, {"max_num_seqs": 2} | LEAST)
def beside_one_that_is_aborted_in_its_answer(rig: Rig, one: GenerationRequest) -> None:
    abort(rig, one, Status.DECODE)


@situation(EVERY)
def beside_those_whose_logits_are_invalid(rig: Rig, one: GenerationRequest) -> Failed:
    """One fails in its prompt, one in a step that it shares."""
    rig.model.decoder.embedding.weight.data[POISON] = float("nan")
    begun(rig, one)
    early, late = asked("early", one.policy, 60), asked("late", one.policy, 62)
    ids = early.prompt_token_ids
    rig.submit(replace(early, prompt_token_ids=(*ids[:30], POISON, *ids[30:])))
    rig.submit(replace(late, prompt_token_ids=(*ids, POISON, 5), num_prefill_tokens=60))
    over(rig, "early", "late")
    assert all(str(rig.records[name].error).endswith(f" {name}.") for name in ("early", "late"))
    assert rig.engine.stats().requests_failed_total == 2
    rig.submit(*(asked(f"next {number}", one.policy) for number in range(2)))
    return {"early": InvalidLogits, "late": InvalidLogits}


# Slots, seats and an arena that run out.


@situation(
    ("pqcache", "clusterkv", "bitkeys"),
    {"slot_bytes": pool_of(12)},
    {"slot_bytes": pool_of(12), "full_layers": 1},
)
def with_slots_lent_to_others(rig: Rig, one: GenerationRequest) -> None:
    begun(rig, longer(one, 300, 80))
    sequence = rig.sequence("one")
    assert not sequence.can_miss
    rig.submit(asked("filler", prompt=300, max_tokens=20), asked("new", prompt=100, max_tokens=20))
    rig.step_to("new", Status.DECODE)
    squeezed = sequence.num_slots
    assert sequence.can_miss
    over(rig, "new", "filler")
    rig.step()
    assert squeezed < sequence.num_slots


@situation(("pqcache", "clusterkv"), {"slot_bytes": pool_of(8)})
def with_slots_lent_before_its_index_is_there(rig: Rig, one: GenerationRequest) -> None:
    rig.store.holds_builds = True
    begun(rig, longer(one, 300, 60), Status.INDEXING)
    rig.submit(asked("new", prompt=200, max_tokens=30))
    rig.step(2)
    assert rig.sequence("one").can_miss
    rig.store.finish_builds()
    rig.store.holds_builds = False


@situation(("clusterkv",), {"slot_bytes": pool_of(1)})
def with_a_window_in_most_of_few_slots(rig: Rig, one: GenerationRequest) -> None:
    # 4 sinks, 40 of the window, a new token and 6 selected.
    rig.submit(replace(one, budget=Budget(tokens=10)))


def preempted(rig: Rig) -> None:
    rig.step_until(lambda: rig.engine.stats().preemptions_total)
    assert rig.status("one") is Status.WAITING


@situation(EVERY, {"max_num_seqs": 1})
@situation(TRAINED, {"max_num_seqs": 1, "reuses_prefixes": True})
def preempted_in_its_answer_for_a_seat(rig: Rig, one: GenerationRequest) -> None:
    rig.submit(one)
    rig.step_to("one", Status.DECODE, 20)
    rig.submit(asked("high", max_tokens=4, priority=-1))
    preempted(rig)


@situation(EVERY, {"max_num_seqs": 1})
def preempted_in_its_prompt_for_a_seat(rig: Rig, one: GenerationRequest) -> None:
    rig.submit(one)
    rig.step(4)
    told = list(rig.records["one"].events)
    rig.submit(asked("high", max_tokens=4, priority=-1))
    preempted(rig)
    rig.drain()
    # Its progress is reported once.
    assert [event for event in rig.records["one"].events if isinstance(event, ProgressEvent)] == told


@situation(("full", "clusterkv", "h2o"), {"slot_bytes": pool_of(7)})
@situation(("pqcache", "chelsea"), {"slot_bytes": pool_of(7), "full_layers": 1})
def preempted_for_slots_by_a_more_important_one(rig: Rig, one: GenerationRequest) -> None:
    rig.submit(longer(one, 150, 60))
    rig.step_to("one", Status.DECODE, 40)
    rig.submit(asked("high", prompt=400, max_tokens=20, priority=-1))
    rig.step_to("high", Status.DECODE)


@situation(("full", "oracle"), {"slot_bytes": pool_of(5)})
@situation(("pqcache", "h2o"), {"slot_bytes": pool_of(5), "full_layers": 3})
@situation(("pqcache",), {"slot_bytes": pool_of(5), "full_layers": 1})
def preempted_where_slots_run_out_as_answers_grow(rig: Rig, one: GenerationRequest) -> None:
    rig.submit(asked("old", one.policy, 60, 120), longer(one, 62, 110))


@situation(STORED, {"capacity_tokens": 256})
@situation(("pqcache",), {"capacity_tokens": 256, "reuses_prefixes": True}, {"capacity_tokens": 256} | LEAST)
def preempted_where_the_arena_is_full(rig: Rig, one: GenerationRequest) -> None:
    # Both hold two slabs of four; "old" is the first that needs a third.
    rig.submit(asked("old", one.policy, 120, 70), longer(one, 100, 90))
    preempted(rig)


@situation(("clusterkv",), {"capacity_tokens": 256})
def preempted_after_a_question_that_came_late(rig: Rig, one: GenerationRequest) -> None:
    rig.submit(asked("old", one.policy, 120, 70), longer(one, 110, 70, num_prefill_tokens=80))
    preempted(rig)


@situation(("oracle",), {"capacity_tokens": 256})
def aborted_while_it_waits_again(rig: Rig, one: GenerationRequest) -> None:
    rig.submit(asked("old", one.policy, 120, 70), longer(one, 100, 90))
    preempted(rig)
    num_tokens = len(rig.records["one"].tokens)
    rig.engine.abort("one")
    usage = rig.records["one"].usage
    assert (usage.completion_tokens, usage.device_bytes, usage.host_bytes) == (num_tokens, 0, 0)


@situation(TRAINED, {"capacity_tokens": 192})
def waiting_for_the_arena(rig: Rig, one: GenerationRequest) -> None:
    begun(rig, asked("holds", "oracle", 120, 30))
    rig.submit(one, asked("dense", prompt=30, max_tokens=6))
    over(rig, "dense")
    assert not rig.records["one"].events


@situation(("pqcache", "bitkeys"), {"capacity_tokens": 192})
def filling_the_arena_with_every_row_in_its_slots(rig: Rig, one: GenerationRequest) -> None:
    begun(rig, longer(one, 120, 80))
    assert rig.sequence("one").offloads
    rig.drain()
    assert rig.records["one"].usage.host_bytes == 0
    assert rig.engine.stats().fallbacks_total["without_store"] == 1


# Known prefixes.

KNOWN = {"reuses_prefixes": True}
IN_SLOTS = {"reuses_prefixes": True, "reads_slots": True}


def after_like(rig: Rig, one: GenerationRequest) -> GenerationRequest:
    """Serve another request with the same document, and return this one about it."""
    like = longer(one, 150, 50)
    rig.run(replace(like, request_id="like", policy="full", sampling=replace(like.sampling, max_tokens=1)))
    return like


@situation((*EVERY, "scissorhands"), KNOWN)
@situation(TRAINED, KNOWN | LEAST)
def with_a_known_prefix(rig: Rig, one: GenerationRequest) -> None:
    record = rig.run(after_like(rig, one))[0]
    assert record.usage.cached_tokens == CACHED.get(one.policy, 128)


def poison(rig: Rig) -> None:
    """Make all that the arena has of prompts invalid."""
    for rows in rig.store.prefixes.values():
        rows[:] = 0xFF


@situation(("full", "oracle", "snapkv", "chelsea"), IN_SLOTS)
def with_a_known_prefix_in_slots(rig: Rig, one: GenerationRequest) -> None:
    like = after_like(rig, one)
    for name, more, cached in (("second", 60, 128), ("one", 100, 192)):
        poison(rig)
        turn = replace(
            like, request_id=name, prompt_token_ids=(*like.prompt_token_ids, *([7, 9] * more)[:more])
        )
        assert rig.run(turn)[0].usage.cached_tokens == cached


@situation(("full",), IN_SLOTS)
def with_a_known_prefix_in_slots_of_one_that_runs(rig: Rig, one: GenerationRequest) -> None:
    begun(rig, asked("first", prompt=150, max_tokens=60))
    poison(rig)
    rig.submit(replace(one, prompt_token_ids=(*rig.asked["first"].prompt_token_ids, 5, 6)))


@situation(("full", "oracle", "snapkv"), IN_SLOTS | {"slot_bytes": pool_of(4)})
def with_a_known_prefix_whose_slots_others_took(rig: Rig, one: GenerationRequest) -> None:
    like = after_like(rig, one)
    rig.run(asked("others", prompt=230, max_tokens=20))
    assert rig.run(like)[0].usage.cached_tokens == 128


@situation(("full", "snapkv"), IN_SLOTS | {"slot_bytes": pool_of(8), "prefill_chunk": 32})
def with_a_known_prefix_whose_slots_others_take_meanwhile(rig: Rig, one: GenerationRequest) -> None:
    like = after_like(rig, one)
    rig.submit(replace(like, prompt_token_ids=(*like.prompt_token_ids, *range(60))))
    rig.step(2)
    rig.submit(asked("others", prompt=120, max_tokens=20))


def hold_proofs(rig: Rig) -> Future[int]:
    """Answer comparisons of shared slabs from now on with what is returned, once it is set."""
    proof: Future[int] = Future()
    rig.store.verify = lambda _sequence_id: proof  # type: ignore[method-assign,assignment]
    return proof


def lose_prefix(rig: Rig, proof: Future[int]) -> None:
    """Report a prefix as corrupt when all of the prompt is computed, and its first token sampled or forced."""

    def is_computed() -> bool:
        found = rig.runner.prefills.get(rig.sequence("one"))
        return found is not None and found.is_computed

    rig.step_until(is_computed)
    assert rig.sequence("one").num_cached
    rig.step()
    assert rig.status("one") is Status.PREFILL
    proof.set_result(1)
    rig.drain()
    assert rig.engine.stats().fallbacks_total["recompute"] == 1


@situation(("full", "pqcache", "clusterkv", "snapkv", "chelsea"), KNOWN)
def with_a_prefix_that_is_lost(rig: Rig, one: GenerationRequest) -> None:
    like = after_like(rig, one)
    proof = hold_proofs(rig)
    rig.submit(like)
    lose_prefix(rig, proof)


@situation(("full", "pqcache", "snapkv"), KNOWN)
def with_a_prefix_that_is_lost_before_a_late_question(rig: Rig, one: GenerationRequest) -> None:
    like = after_like(rig, one)
    proof = hold_proofs(rig)
    rig.submit(replace(like, num_prefill_tokens=140))
    lose_prefix(rig, proof)


@situation(("full", "pqcache"), KNOWN | {"max_num_seqs": 1})
def preempted_and_then_its_prefix_is_lost(rig: Rig, one: GenerationRequest) -> None:
    begun(rig, longer(one, 150, 40))
    proof = hold_proofs(rig)
    rig.submit(asked("high", max_tokens=4, priority=-1))
    over(rig, "high")
    lose_prefix(rig, proof)


# A store that is slow, silent, lost, or another one.


@situation(TRAINED, {}, LEAST)
def with_an_index_that_comes_late(rig: Rig, one: GenerationRequest) -> None:
    rig.store.holds_builds = True
    rig.submit(one, asked("dense"))
    over(rig, "dense")
    assert not rig.records["one"].is_over
    rig.store.finish_builds()
    rig.store.holds_builds = False
    rig.drain()
    assert rig.records["one"].usage.index_wait_ms > 0


@situation(("clusterkv",), {}, LEAST)
def with_a_window_whose_index_comes_late(rig: Rig, one: GenerationRequest) -> None:
    begun(rig, replace(one, request_id="gone"))
    begun(rig, one)
    rig.store.holds_builds = True
    rig.submit(asked("dense", max_tokens=60))
    rig.step_until(lambda: len(rig.store.held_builds) == 2 * NUM_LAYERS)
    rig.engine.abort("gone")
    num_tokens = len(rig.records["one"].tokens)
    over(rig, "dense")
    assert len(rig.records["one"].tokens) == num_tokens
    rig.store.finish_builds()
    rig.store.holds_builds = False
    rig.drain()
    assert sum(rig.engine.stats().decode_stall_seconds["index"].counts) > 0


STAGES = {"prefill_chunk": 20} | LEAST
ENDS = {"one": StoreUnavailable}


def fail_at(rig: Rig, one: GenerationRequest, status: Status, failure: Exception) -> None:
    """Let the store fail when this request has come so far, and check that a dense one goes on."""
    begun(rig, asked("dense", max_tokens=60))
    if status is not Status.WAITING:
        rig.store.holds_builds = status is Status.INDEXING
        begun(rig, one, status)
    rig.store.failure = failure
    if status is Status.WAITING:
        rig.submit(one)
    over(rig, "dense")
    rig.engine.check_store()
    assert not rig.engine.is_store_reachable


def answer_again(rig: Rig) -> None:
    rig.store.failure = rig.store.lost = None
    rig.store.finish_builds()
    rig.store.holds_builds = False
    rig.engine.check_store()


def at_stages(happens: Callable[[Rig, GenerationRequest, Status], Failed]) -> None:
    """Enter a situation for each stage, and each policy that needs the store there."""
    for status in (Status.WAITING, Status.PREFILL, Status.INDEXING, Status.DECODE):
        for policy in STORED if status in (Status.WAITING, Status.PREFILL) else TRAINED:

            def at_stage(rig: Rig, one: GenerationRequest, status: Status = status) -> Failed:
                return happens(rig, one, status)

            add_case(at_stage, policy, STAGES, happens.__name__, status.name)


@at_stages
def with_a_store_that_is_silent_for_a_while(rig: Rig, one: GenerationRequest, status: Status) -> None:
    fail_at(rig, one, status, StoreSilent("it is stopped"))
    assert not rig.records["one"].is_over
    # There is nothing to do but wait: the thread may sleep.
    assert not any(rig.engine.step() for _ in range(5))
    answer_again(rig)
    assert rig.engine.is_store_reachable
    rig.drain()
    stalls = rig.engine.stats().decode_stall_seconds
    assert sum(stalls["store"].counts) == (status is Status.DECODE)
    # The attachment is the same.
    assert rig.store.num_attached == 1


@at_stages
def with_a_store_that_is_silent_too_long(rig: Rig, one: GenerationRequest, status: Status) -> Failed:
    fail_at(rig, one, status, StoreSilent("it is stopped"))
    rig.store.silent_for = PATIENCE_SECONDS
    rig.engine.check_store()
    assert "did not answer for" in str(rig.records["one"].error)
    assert not rig.engine.has_work
    # It is released there once the store answers.
    assert set(rig.store.rows) == (set() if status is Status.WAITING else {"one"})
    answer_again(rig)
    rig.submit(replace(one, request_id="again"))
    return ENDS


@at_stages
def aborted_while_the_store_is_silent(rig: Rig, one: GenerationRequest, status: Status) -> None:
    fail_at(rig, one, status, StoreSilent("it is stopped"))
    rig.engine.abort("one")
    rig.drain()
    answer_again(rig)


@at_stages
def with_a_store_that_is_lost(rig: Rig, one: GenerationRequest, status: Status) -> Failed:
    fail_at(rig, one, status, StoreUnreachable("a socket's path"))
    rig.store.finish_builds()
    over(rig, "one")
    # What the client says may name sockets: it is for the log.
    assert "socket" not in str(rig.records["one"].error)
    stats = rig.engine.stats()
    assert (stats.requests_failed_total, stats.requests_finished_total) == (1, 1)
    answer_again(rig)
    rig.submit(replace(one, request_id="again"))
    return ENDS


def lose_lease(rig: Rig) -> None:
    """Let only the heartbeat learn that the store was started again: no index comes any more."""
    rig.submit(asked("dense", max_tokens=60))
    rig.store.holds_builds = True
    rig.store.lost = StaleEpoch("it was started again")
    over(rig, "one", "dense")
    rig.store.holds_builds = False


@situation(TRAINED, {}, LEAST)
def with_a_lease_lost_while_its_index_is_trained(rig: Rig, one: GenerationRequest) -> Failed:
    rig.store.holds_builds = True
    begun(rig, one, Status.INDEXING)
    lose_lease(rig)
    return ENDS


@situation(("clusterkv",), {}, LEAST)
def with_a_lease_lost_in_its_answer(rig: Rig, one: GenerationRequest) -> Failed:
    begun(rig, one)
    lose_lease(rig)
    return ENDS


@situation(("pqcache", "bitkeys"))
def with_every_row_in_slots_and_the_store_lost(rig: Rig, one: GenerationRequest) -> None:
    begun(rig, one)
    rig.store.failure, rig.store.lost = StoreSilent("it is stopped"), StoreUnreachable("silent for a lease")
    over(rig, "one")
    assert rig.engine.stats().fallbacks_total["without_store"] == 1
    answer_again(rig)


@situation(RECALL, {"trains_indexes": True})
def with_nothing_in_a_store_that_is_lost(rig: Rig, one: GenerationRequest) -> Failed:
    """A request that is measured has its rows there."""
    begun(rig, one)
    begun(rig, replace(one, request_id="measured", measure=True))
    rig.store.lost = StoreUnreachable("silent for a lease")
    over(rig, "one", "measured")
    return {"measured": StoreUnavailable}


@situation(STORED)
def after_a_restart_of_the_store(rig: Rig, one: GenerationRequest) -> Failed:
    begun(rig, asked("running", "oracle"))
    restart(rig.store)
    rig.submit(one)
    return {"running": StoreUnavailable}


def restart(store: StrictStore) -> None:
    """Refuse every call until the client attaches anew."""
    store.failure = StaleEpoch("it was started again")
    reattach = store.reattach

    def attach_to_the_new_one() -> None:
        store.failure = None
        reattach()

    store.reattach = attach_to_the_new_one  # type: ignore[method-assign]


@pytest.mark.parametrize(("happens", "policy", "options"), CASES)
def test_answers_are_those_of_requests_alone(happens: Happens, policy: str, options: dict[str, Any]) -> None:
    rig = Rig(**{"policies": every_small_policy(), **options})
    # Crosses a slab, a block, a window of `clusterkv`, and intervals of `chelsea`.
    failed = happens(rig, asked("one", policy, 120, 50))
    rig.drain()
    rig.check_answers(failed or {})
    rig.check_empty()
