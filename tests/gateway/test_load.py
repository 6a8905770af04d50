"""One key's flood beside another key's requests: by order and counts, not by times."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from gateway_stack import Stack, running_stack
from waiting import PATIENCE, wait_until

from gateway.tokenizer import Tokenizer

NUM_POSTS = 24
LONG = "the quick brown fox " * 20_000
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
ONE, TWO = ({"Authorization": f"Bearer {key}-key"} for key in ("one", "two"))


@pytest.fixture
def two_keys(tmp_path: Path, model_dir: Path) -> Iterator[Stack]:
    keys = ("one-key", "two-key")
    with running_stack(tmp_path, model_dir, max_model_len=200_000, api_keys=keys) as stack:
        stack.say("the fox")
        yield stack


def test_a_chat_is_answered_before_the_first_of_another_keys_long_texts(
    two_keys: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end, encode = threading.Event(), threading.Event(), Tokenizer.encode

    def held(self: Tokenizer, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) >= len(LONG):
            has_begun.set()
            assert may_end.wait(PATIENCE)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", held)
    with (
        httpx.Client(base_url=two_keys.url, timeout=PATIENCE) as http,
        ThreadPoolExecutor(NUM_POSTS) as pool,
    ):
        try:
            posts = [
                pool.submit(http.post, "/tokenize", json={"prompt": LONG}, headers=ONE)
                for _ in range(NUM_POSTS)
            ]
            wait_until(has_begun.is_set)
            for key in (TWO, ONE):
                assert http.post("/v1/chat/completions", json=CHAT, headers=key).status_code == 200
            assert not any(post.done() for post in posts)
        finally:
            may_end.set()
        assert {post.result().status_code for post in posts} == {200}


def test_the_worker_is_asked_once_for_all_who_ask_meanwhile(two_keys: Stack) -> None:
    status = two_keys.service.status

    async def ask() -> list[object]:
        asked = [*(status.is_alive() for _ in range(20)), *(status.why_not_ready() for _ in range(20))]
        return await asyncio.gather(*asked)

    answers = asyncio.run_coroutine_threadsafe(ask(), two_keys.loop).result(PATIENCE)
    assert answers == [True] * 20 + [None] * 20
    assert two_keys.script.num_asked == 2
