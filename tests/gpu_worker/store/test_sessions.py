"""Conversations: what the store has of their prompts outlives what others ask meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine_rig import LAYOUT, NUM_LAYERS, TOKEN_BYTES, Rig, random_prompt, request

from gpu_worker.engine.request import Status
from gpu_worker.errors import RequestError, StoreUnavailable
from gpu_worker.records import GenerationRequest
from gpu_worker.store.sessions import Sessions
from kv_store.client import StoreClient
from kv_store.local import LocalStore

PER_SLAB = 64
SLAB_BYTES = PER_SLAB * LAYOUT.token_bytes
# Of 260 tokens, which fit beside each other.
NUM_PROMPTS = 4
CHAT = random_prompt(260)


@pytest.fixture
def rig() -> Iterator[Rig]:
    num_slabs = NUM_PROMPTS * NUM_LAYERS * 5
    with LocalStore(num_slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES) as store:
        client = StoreClient.connect(store.target, LAYOUT, worker_id="w", timeout_seconds=5.0)
        made = Rig(reuses_prefixes=True, client=client)
        made.client = client  # type: ignore[attr-defined]
        yield made
        made.engine.close()


def asked(name: str, prompt: tuple[int, ...], session: str = "", salt: bytes = b"me") -> GenerationRequest:
    one = request(name, "oracle", 0.25, prompt=prompt, max_tokens=4)
    return replace(one, session_id=session, prefix_salt=salt)


def cached(rig: Rig, one: GenerationRequest) -> int:
    return rig.run(one)[0].usage.cached_tokens


def crowd(rig: Rig, salt: bytes = b"me") -> None:
    """Run so many other prompts of a caller that none of its earlier ones is left, except in sessions."""
    for number in range(NUM_PROMPTS):
        rig.run(asked(f"crowd {salt!r} {number}", random_prompt(260, seed=100 + number), salt=salt))


def test_a_conversation_is_still_known_after_a_crowd_and_others_are_not(rig: Rig) -> None:
    rig.run(asked("1", CHAT, "a chat"), asked("2", random_prompt(260, seed=1)))
    crowd(rig)
    assert cached(rig, asked("3", CHAT + random_prompt(20, seed=2), "a chat")) == 256
    assert cached(rig, asked("4", random_prompt(260, seed=1))) == 0


@pytest.mark.parametrize("salt", [b"me", b"others"])
def test_another_callers_crowd_leaves_what_a_caller_has(rig: Rig, salt: bytes) -> None:
    rig.run(asked("1", CHAT))
    crowd(rig, salt)
    assert (cached(rig, asked("2", CHAT)) == 256) is (salt != b"me")


def test_a_session_changes_no_answer(rig: Rig) -> None:
    plain = rig.tokens(asked("plain", CHAT))
    assert rig.tokens(asked("named", CHAT, "a chat")) == plain
    short = asked("short", CHAT[: PER_SLAB // 2], "a chat")
    # Nothing of it fills a slab: nothing is kept, and nothing is wrong.
    assert rig.tokens(short) == rig.tokens(replace(short, request_id="again", session_id=""))


@pytest.mark.parametrize("policy", ["oracle", "full", "streaming_llm"])
def test_what_a_session_holds_is_listed_and_known_whatever_the_policy(rig: Rig, policy: str) -> None:
    def one(name: str, prompt: tuple[int, ...]) -> GenerationRequest:
        return replace(asked(name, prompt, "a chat"), policy=policy)

    sessions = rig.runner.offloader.sessions
    rig.run(one("1", CHAT))
    [held] = sessions.list(b"me")
    assert (held.session_id, held.tokens, held.pinned) == ("a chat", 256, False)
    assert held.bytes == 256 * TOKEN_BYTES
    assert cached(rig, one("2", CHAT + random_prompt(20, seed=2))) == 256
    [again] = sessions.list(b"me", "a chat")
    assert again.created_at == held.created_at <= held.last_used_at < again.last_used_at


def test_a_session_is_its_callers_own_and_the_store_is_told_no_caller(rig: Rig) -> None:
    sessions, theirs = rig.runner.offloader.sessions, b"a key of theirs"
    rig.run(asked("1", CHAT, "a chat"))
    rig.run(asked("2", CHAT[:100], "a chat", theirs))
    assert sessions.list(b"nobody") == sessions.list(b"me", "another chat") == ()
    assert not sessions.drop(b"nobody", "a chat")
    assert not sessions.pin(b"me", "another chat", True)
    assert sessions.drop(b"me", "a chat")
    assert not sessions.drop(b"me", "a chat")
    assert sessions.list(b"me") == ()
    assert [held.tokens for held in sessions.list(theirs)] == [64]
    # A store that two models share keeps them apart.
    assert Sessions(rig.client, b"another model").list(theirs) == ()  # type: ignore[attr-defined]


def test_a_dropped_session_gives_its_bytes_back_and_a_pinned_one_outlives_the_others(rig: Rig) -> None:
    sessions, client = rig.runner.offloader.sessions, rig.client  # type: ignore[attr-defined]
    base = client.stats().reserved_bytes
    rig.run(asked("1", CHAT, "a chat"))
    assert sessions.pin(b"me", "a chat", True, 100.0)
    for number in range(2 * NUM_PROMPTS):
        rig.run(asked(f"{number}", random_prompt(260, seed=number), f"chat {number}"))
    first = sessions.list(b"me")[0]
    assert (first.session_id, first.pinned) == ("a chat", True)
    assert first.expires_at > first.last_used_at + 99
    with pytest.raises(RequestError, match="one caller may pin 25%") as refused:
        sessions.pin(b"me", f"chat {2 * NUM_PROMPTS - 1}", True)
    assert (refused.value.param, refused.value.code) == ("pinned", "pin_limit")
    for held in sessions.list(b"me"):
        assert sessions.drop(b"me", held.session_id)
    assert client.stats().num_sessions == 0
    left = client.stats().reserved_bytes
    rig.run(asked("last", CHAT, "a chat"))
    assert client.stats().reserved_bytes - left == 256 * TOKEN_BYTES
    sessions.drop(b"me", "a chat")
    assert client.stats().reserved_bytes == left
    assert base <= left


@pytest.mark.parametrize("policy", ["oracle", "full"])
@pytest.mark.parametrize("status", [Status.WAITING, Status.PREFILL])
def test_a_dropped_session_comes_back_with_a_later_request_only(
    rig: Rig, policy: str, status: Status
) -> None:
    """Hold for a request that keeps its rows in the store, and for one that only copies them there."""
    sessions, client = rig.runner.offloader.sessions, rig.client  # type: ignore[attr-defined]
    rig.run(replace(asked("first", CHAT, "a chat"), policy=policy))
    base = client.stats().reserved_bytes - 256 * TOKEN_BYTES
    turn = replace(asked("second", CHAT + random_prompt(130, seed=2), "a chat"), policy=policy)
    rig.submit(turn)
    if status is not Status.WAITING:
        rig.step_to("second", status)
    assert sessions.drop(b"me", "a chat")
    rig.drain()
    assert len(rig.records["second"].tokens) == 4
    assert sessions.list(b"me") == ()
    assert client.stats().reserved_bytes == base
    later = replace(asked("later", CHAT + random_prompt(130, seed=2), "a chat"), policy=policy)
    assert cached(rig, later) == 0
    assert [held.tokens for held in sessions.list(b"me")] == [384]


def test_without_the_store_a_caller_is_told_so() -> None:
    with LocalStore(1 << 20, slab_bytes=SLAB_BYTES) as store:
        client = StoreClient.connect(store.target, LAYOUT, worker_id="w", timeout_seconds=5.0)
        sessions = Sessions(client)
        store.restart()
        for ask in (
            lambda: sessions.list(b"me"),
            lambda: sessions.pin(b"me", "a chat", True),
            lambda: sessions.drop(b"me", "a chat"),
        ):
            with pytest.raises(StoreUnavailable):
                ask()
        client.reattach()
        assert sessions.list(b"me") == ()
        client.close()
