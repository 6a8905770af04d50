"""Prompts of requests that need no store: what is known of them is not computed again, and no store is no harm."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from engine_rig import LAYOUT, TOKEN_BYTES, Rig, every_small_policy, random_prompt, request, tokens_alone
from offload_rig import count_calls
from waiting import PATIENCE

from gpu_worker.engine.request import Status
from gpu_worker.records import GenerationRequest
from kv_store.client import StaleEpoch, StoreClient, StoreSilent, StoreUnreachable
from kv_store.client.rpc import StoreRpc
from kv_store.local import LocalStore

# Slabs of 64 tokens: the document fills four.
DOCUMENT = random_prompt(300)
KNOWN = 256
# Their scores need the queries of the whole prompt.
READS_ALL_QUERIES = ["h2o", "semantickv"]
NEEDS_NO_STORE = ["full", "auto", "snapkv", "streaming_llm", "scissorhands", "chelsea", "nacl"]
# With indexes that the worker trains.
RECALLS = ["pqcache", "clusterkv"]


def asked(name: str, policy: str, seed: int, **options: object) -> GenerationRequest:
    """A question of its own about the document."""
    prompt = DOCUMENT + random_prompt(30 + seed, seed=seed)
    return request(name, policy, 0.25, prompt=prompt, max_tokens=20, **options)  # type: ignore[arg-type]


def rig_for(policy: str, reuses_prefixes: bool = True, **options: object) -> Rig:
    """For this policy, which then needs no store."""
    return Rig(
        policies=every_small_policy(),
        trains_indexes=policy in RECALLS,
        reuses_prefixes=reuses_prefixes,
        **options,  # type: ignore[arg-type]
    )


def cold(one: GenerationRequest) -> list[int]:
    return rig_for(one.policy, reuses_prefixes=False).tokens(one)


@pytest.mark.parametrize("policy", [*NEEDS_NO_STORE, *RECALLS, *READS_ALL_QUERIES])
def test_a_second_question_is_answered_as_by_a_cold_engine(policy: str) -> None:
    rig, second = rig_for(policy), asked("second", policy, 2)
    assert rig.run(asked("first", policy, 1))[0].usage.cached_tokens == 0
    record = rig.run(second)[0]
    assert record.usage.cached_tokens == (0 if policy in READS_ALL_QUERIES else KNOWN)
    assert record.usage.offloaded_tokens == 0
    assert record.tokens == cold(second)
    rig.check_empty()


@pytest.mark.parametrize("first", ["full", "h2o", "pqcache"])
@pytest.mark.parametrize("second", ["full", "snapkv", "clusterkv"])
def test_rows_are_the_same_whatever_the_policy(first: str, second: str) -> None:
    rig, again = rig_for(second), asked("second", second, 2)
    rig.run(asked("first", first, 1))
    record = rig.run(again)[0]
    assert record.usage.cached_tokens == KNOWN
    assert record.tokens == cold(again)


def test_rows_of_a_prompt_that_is_attended_in_part_are_nobodys() -> None:
    rig = Rig(policies=every_small_policy(), trains_indexes=True, reuses_prefixes=True)
    rig.run(asked("first", "infllm+sparse", 1))
    assert not rig.store.prefixes
    rig.run(asked("known", "full", 1))
    assert rig.run(asked("second", "infllm+sparse", 2))[0].usage.cached_tokens == 0


def test_a_second_turn_computes_the_last_answer_and_what_is_new() -> None:
    rig = rig_for("full")
    first = request("first", prompt=DOCUMENT[:KNOWN], max_tokens=90)
    answer = rig.tokens(first)
    turn = (*DOCUMENT[:KNOWN], *answer, *random_prompt(20, seed=3))
    second = request("second", prompt=turn, max_tokens=20)
    record = rig.run(second)[0]
    assert record.usage.cached_tokens == KNOWN
    assert record.tokens == cold(second)


def test_what_is_copied_is_counted_once() -> None:
    rig = rig_for("full")
    for number in range(2):
        rig.run(asked(f"{number}", "full", number))
    # Five slabs of the first prompt, and the fifth of the second.
    assert rig.engine.stats().offloaded_bytes_total == (320 + 64) * TOKEN_BYTES


def test_a_known_prompt_overtakes_a_shorter_unknown_one() -> None:
    rig = rig_for("full", prefill_chunk=16, stretch=1000.0)
    rig.run(asked("first", "full", 1))
    rig.submit(request("unknown", prompt=random_prompt(200, seed=7)), asked("known", "full", 2))
    rig.step_to("known", Status.DECODE)
    assert not rig.records["unknown"].tokens
    # What was known is forgotten with the store.
    rig.drain()
    rig.store.failure = StaleEpoch("restarted")
    rig.run(asked("lost", "full", 3))
    rig.store.failure = None
    rig.run(request("attaches", "oracle", 0.25))
    rig.submit(asked("long", "full", 4), request("short", prompt=random_prompt(200, seed=7)))
    rig.step_to("short", Status.DECODE)
    assert not rig.records["long"].tokens


@pytest.mark.parametrize("capacity_tokens", [64, 300])
def test_where_the_arena_is_full_a_prompt_is_computed_and_not_kept(capacity_tokens: int) -> None:
    rig = rig_for("full", capacity_tokens=capacity_tokens)
    for number in range(3):
        one = asked(f"{number}", "snapkv", number)
        record = rig.run(one)[0]
        assert (record.usage.cached_tokens, record.tokens) == (0, cold(one))
    assert not rig.store.prefixes
    rig.check_empty()


def test_a_known_prefix_is_read_where_the_arena_has_no_room_for_more() -> None:
    rig = rig_for("full", capacity_tokens=320)
    rig.run(request("first", prompt=DOCUMENT, max_tokens=5))
    second = request("second", prompt=DOCUMENT + random_prompt(200, seed=1), max_tokens=20)
    record = rig.run(second)[0]
    assert (record.usage.cached_tokens, record.tokens) == (KNOWN, cold(second))
    rig.check_empty()


def check_giving_way(rig: Rig, needs: GenerationRequest) -> None:
    """Check that a request which needs the arena takes the space of a prompt that is only copied there."""
    rig.run(request("known", prompt=DOCUMENT[:65], max_tokens=1))
    copied = request("copied", prompt=DOCUMENT, max_tokens=20)
    rig.submit(copied)
    rig.step_to("copied", Status.PREFILL)
    rig.submit(needs)
    rig.drain()
    assert rig.records["needs"].tokens == tokens_alone(needs)
    # It was reading a prefix meanwhile, and read on.
    assert rig.records["copied"].usage.cached_tokens == 64
    assert rig.records["copied"].tokens == cold(copied)


def test_copies_give_way_to_who_needs_the_room() -> None:
    rig = rig_for("full", capacity_tokens=320, prefill_chunk=16)
    check_giving_way(rig, request("needs", "pqcache", 0.3, prompt=random_prompt(120, seed=9), max_tokens=20))
    assert len(rig.store.prefixes) == 2
    rig.check_empty()


@pytest.mark.parametrize("lost", [StoreUnreachable("gone"), StoreSilent("hangs"), StaleEpoch("restarted")])
@pytest.mark.parametrize("num_steps", [1, 12, 25])
def test_a_prefix_that_is_lost_while_it_is_read_is_computed(lost: Exception, num_steps: int) -> None:
    rig, second = rig_for("full", prefill_chunk=8), asked("second", "snapkv", 2)
    rig.run(asked("first", "full", 1))
    rig.submit(second, asked("beside", "full", 3))
    rig.step(num_steps)
    assert rig.status("second") is Status.PREFILL
    rig.store.lost = lost
    rig.drain()
    assert rig.records["second"].tokens == cold(second)
    assert len(rig.records["beside"].tokens) == 20
    # What was read before that stays read only if it was the last of it.
    cached_tokens = rig.records["second"].usage.cached_tokens
    assert cached_tokens in (0, KNOWN)
    stats = rig.engine.stats()
    assert stats.requests_failed_total == 0
    assert stats.fallbacks_total["recompute"] == (cached_tokens == 0)
    rig.engine.check_store()
    assert not rig.runner.offloader.extents


@pytest.mark.parametrize("failure", [StoreUnreachable("gone"), StoreSilent("hangs")])
def test_a_store_that_does_not_answer_is_not_asked(failure: Exception) -> None:
    rig = rig_for("full")
    rig.store.failure = failure
    calls = count_calls(rig.store, "begin")
    for number in range(3):
        assert len(rig.run(asked(f"{number}", "full", number))[0].tokens) == 20
    assert calls == []
    rig.store.failure = None
    assert len(rig.run(asked("back", "full", 5))[0].tokens) == 20
    assert rig.run(asked("again", "full", 6))[0].usage.cached_tokens == KNOWN


def test_who_has_another_key_or_salt_shares_nothing() -> None:
    rig = rig_for("full")
    mine = asked("mine", "full", 1)
    cached = [
        rig.run(replace(mine, request_id=f"{number}", **salts))[0].usage.cached_tokens  # type: ignore[arg-type]
        for number, salts in enumerate(
            [
                {},
                {"prefix_salt": b"me"},
                {"cache_salt": "mine"},
                {"prefix_salt": b"me", "cache_salt": "mine"},
                {"cache_salt": "mine"},
                {"prefix_salt": b"me", "cache_salt": "mine"},
            ]
        )
    ]
    assert cached == [0, 0, 0, 0, 320, 320]


def test_an_aborted_prompt_leaves_no_copy() -> None:
    rig = rig_for("full", prefill_chunk=16)
    rig.submit(asked("aborted", "full", 1))
    rig.step_to("aborted", Status.PREFILL)
    rig.step(3)
    rig.engine.abort("aborted")
    assert not rig.store.prefixes
    rig.check_empty()


@pytest.mark.parametrize("transport", ["zero_copy", "shm", "grpc"])
def test_the_real_store_has_the_copies(transport: str) -> None:
    """But not where it is reached over a network."""
    with LocalStore(64 * 64 * LAYOUT.token_bytes, slab_bytes=64 * LAYOUT.token_bytes) as store:
        client = StoreClient.connect(
            store.target, LAYOUT, worker_id="w", transport=transport, timeout_seconds=5.0, max_gather_rows=512
        )
        rig = rig_for("full", client=client)
        second = asked("second", "full", 2)
        rig.run(asked("first", "full", 1))
        record = rig.run(second)[0]
        assert record.usage.cached_tokens == (0 if transport == "grpc" else KNOWN)
        assert record.tokens == cold(second)
        assert client.stats().num_sequences == 0
        rig.engine.close()


def test_a_chat_waits_for_one_call_to_the_store_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    call = StoreRpc.call

    def counted(rpc: StoreRpc, method: Any, request: Any, *arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            waited.append(type(request).__name__)
        return call(rpc, method, request, *arguments)

    monkeypatch.setattr(StoreRpc, "call", counted)
    with LocalStore(64 * 64 * LAYOUT.token_bytes, slab_bytes=64 * LAYOUT.token_bytes) as store:
        client = StoreClient.connect(store.target, LAYOUT, worker_id="w", timeout_seconds=PATIENCE)
        rig = rig_for("full", client=client)
        chat = random_prompt(100)
        for number, prompt in enumerate((chat, chat + chat, chat[:50])):
            waited.clear()
            one = request(f"{number}", prompt=prompt, max_tokens=20)
            record = rig.run(replace(one, session_id="a chat"))[0]
            assert record.usage.cached_tokens == (64 if number == 1 else 0)
            # Nothing of the last fills a slab.
            assert waited == (["BeginRequest"] if number < 2 else [])
        assert (client.stats().num_sequences, client.stats().num_sessions) == (0, 1)
        rig.engine.close()


def test_the_real_store_takes_the_room_of_copies_and_leaves_them_their_prefix() -> None:
    num_slabs = 6 * LAYOUT.num_layers
    with LocalStore(num_slabs * 64 * LAYOUT.token_bytes, slab_bytes=64 * LAYOUT.token_bytes) as store:
        client = StoreClient.connect(store.target, LAYOUT, worker_id="w", timeout_seconds=5.0)
        rig = rig_for("full", client=client, prefill_chunk=16)
        check_giving_way(
            rig, request("needs", "oracle", 0.3, prompt=random_prompt(250, seed=9), max_tokens=20)
        )
        assert client.stats().num_sequences == 0
        rig.engine.close()
