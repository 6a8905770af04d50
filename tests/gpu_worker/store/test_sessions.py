"""Conversations: what the store has of their prompts outlives what others ask meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine_rig import LAYOUT, NUM_LAYERS, Rig, random_prompt, request

from gpu_worker.records import GenerationRequest
from gpu_worker.store.prefixes import session_name
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


def crowd(rig: Rig, salt: bytes = b"others") -> None:
    """So many other prompts that none from before is left that nobody keeps."""
    for number in range(NUM_PROMPTS):
        rig.run(asked(f"crowd {salt!r} {number}", random_prompt(260, seed=100 + number), salt=salt))


def test_a_conversation_is_still_known_after_a_crowd_and_others_are_not(rig: Rig) -> None:
    rig.run(asked("1", CHAT, "a chat"), asked("2", random_prompt(260, seed=1)))
    crowd(rig)
    assert cached(rig, asked("3", CHAT + random_prompt(20, seed=2), "a chat")) == 256
    assert cached(rig, asked("4", random_prompt(260, seed=1))) == 0


def test_the_next_turn_takes_the_place_of_the_last(rig: Rig) -> None:
    for turn in range(3):
        prompt = random_prompt(260, seed=turn)
        rig.run(asked(f"{turn}", prompt, "a chat"))
    assert rig.client.stats().num_sessions == 1  # type: ignore[attr-defined]
    crowd(rig)
    assert cached(rig, asked("again", random_prompt(260, seed=2), "a chat")) == 256
    assert cached(rig, asked("before", random_prompt(260, seed=1))) == 0


def test_more_conversations_than_fit_keep_nobody_out(rig: Rig) -> None:
    for number in range(2 * NUM_PROMPTS):
        record = rig.run(asked(f"{number}", random_prompt(260, seed=number), f"chat {number}"))[0]
        assert len(record.tokens) == 4
    assert cached(rig, asked("last", random_prompt(260, seed=2 * NUM_PROMPTS - 1))) == 256
    assert cached(rig, asked("first", random_prompt(260, seed=0))) == 0


def test_a_session_changes_no_answer(rig: Rig) -> None:
    plain = rig.tokens(asked("plain", CHAT))
    assert rig.tokens(asked("named", CHAT, "a chat")) == plain
    short = asked("short", CHAT[: PER_SLAB // 2], "a chat")
    # Nothing of it fills a slab: nothing is kept, and nothing is wrong.
    assert rig.tokens(short) == rig.tokens(replace(short, request_id="again", session_id=""))


def test_a_name_is_the_callers_own_and_tells_nothing() -> None:
    mine, theirs = asked("1", CHAT, "a chat"), asked("2", CHAT, "a chat", b"them")
    assert session_name(mine) == session_name(asked("3", CHAT[:5], "a chat"))
    assert session_name(mine) != session_name(theirs)
    assert session_name(mine) != session_name(asked("4", CHAT, "another chat"))
    assert "chat" not in session_name(mine)
    assert session_name(asked("5", CHAT)) == ""
