"""One key's flood beside another key's requests: by order and counts, not by times."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from gateway_stack import Stack, running_stack
from starlette.types import Message
from waiting import PATIENCE, wait_until

from gateway.attention import MAX_KEY_READERS
from gateway.body_limits import BodyLimits
from gateway.heavy_work import HeavyWork
from gateway.rest.bounded import BoundedRequest
from gateway.rest.schemas import TokenizeBody
from gateway.tokenizer import Tokenizer
from gpu_worker.v1 import gpu_worker_pb2 as pb

UNLIMITED = httpx.Limits(max_connections=None)
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


async def test_bodies_are_parsed_by_turns_of_their_keys() -> None:
    status = Mock(latest=pb.GetInfoResponse(max_model_len=200_000))
    limits, parsed = BodyLimits(status, None, HeavyWork(), 2**28, 60.0), []

    async def read(name: str) -> None:
        raw = json.dumps({"prompt": name + LONG}).encode()

        async def receive() -> Message:
            return {"type": "http.request", "body": raw, "more_body": False}

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "headers": headers, "state": {"caller": name[:3].encode()}}
        body = await BoundedRequest(scope, receive).load(TokenizeBody, limits)
        parsed.append(str(body.prompt)[: len(name)])

    async with asyncio.TaskGroup() as group:
        for name in ("one 0", "one 1", "one 2", "one 3", "two 4"):
            group.create_task(read(name))
    assert parsed == ["one 0", "two 4", "one 1", "one 2", "one 3"]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_flood_of_long_texts_is_measured_beside_chats(two_keys: Stack) -> None:
    """48 posts of 390 KiB to /tokenize by one key; what another key's chats of two tokens wait."""
    text = LONG[: 390 * 1024]
    waits, done = [], []
    async with httpx.AsyncClient(base_url=two_keys.url, timeout=PATIENCE, limits=UNLIMITED) as http:

        async def post() -> None:
            response = await http.post("/tokenize", json={"prompt": text}, headers=ONE)
            done.append(response.status_code)

        async with asyncio.TaskGroup() as group:
            for _ in range(48):
                group.create_task(post())
            while len(done) < 48:
                # the posts come first
                await asyncio.sleep(0.1)
                started_at = time.perf_counter()
                response = await http.post("/v1/chat/completions", json=CHAT, headers=TWO)
                assert response.status_code == 200
                waits.append((round(time.perf_counter() - started_at, 2), len(done)))
    print(json.dumps({"chats, seconds and posts answered before": waits[:20], "longest": max(waits)[0]}))
    assert set(done) == {200}
    assert sum(num_done < 24 for _, num_done in waits) >= 5


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_hundreds_of_readers_of_one_view_are_measured_beside_another_key(two_keys: Stack) -> None:
    """300 readers of one key's view; what another key waits for /version."""
    data = b"\1\0" * (8 * 8 * 512)
    sights = [
        pb.Attention(
            attended=data, on_device=data, layers=range(8), kv_heads=8, context_tokens=32768,
            bucket_tokens=64, step=step,
        )
        for step in range(400)
    ]  # fmt: skip
    two_keys.say("the dog " * 40, sights=sights, token_s=0.1)
    asked = {"messages": CHAT["messages"], "carrel": {"attention": True}}
    waits, statuses = [], Counter[int]()
    async with httpx.AsyncClient(base_url=two_keys.url, timeout=PATIENCE, limits=UNLIMITED) as http:
        asking = asyncio.create_task(
            http.post("/v1/chat/completions", json=asked, headers={**ONE, "X-Request-Id": "seen"})
        )
        while (await http.get("/v1/attention/seen?stream=false", headers=ONE)).status_code != 200:
            await asyncio.sleep(0.05)

        async def read() -> None:
            async with http.stream("GET", "/v1/attention/seen", headers=ONE) as response:
                statuses[response.status_code] += 1
                async for _ in response.aiter_raw():
                    pass

        async with asyncio.TaskGroup() as group:
            for _ in range(300):
                group.create_task(read())
            while not asking.done():
                started_at = time.perf_counter()
                assert (await http.get("/version", headers=TWO)).status_code == 200
                waits.append(round(time.perf_counter() - started_at, 3))
                await asyncio.sleep(0.05)
    print(json.dumps({"/version, median": statistics.median(waits), "longest": max(waits), **statuses}))
    assert statuses[200] <= MAX_KEY_READERS
