"""How long a refused request holds up everybody else, by `make faults`: processor time of the event loop's thread."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stack import Stack, running_stack
from waiting import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# What may go by until others have their turn.
MOST_MS = 100.0
# A body has a mebibyte.
MAX_MODEL_LEN, BODY_BYTES, MANY = 32_768, 1 << 20, 40_000
NUMBERS = ("n", "best_of", "max_tokens", "logprobs", "top_k", "min_tokens", "seed", "prompt_logprobs", "stop")
NUMBERS += ("temperature", "top_p", "presence_penalty", "repetition_penalty", "logit_bias", "priority")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Turns:
    """The most processor time of the loop's thread between two of its turns. Other work of the machine is not in it."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._is_over = False

    async def watch(self) -> None:
        before = time.thread_time()
        while not self._is_over:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest_ms, before = max(self.longest_ms, 1e3 * (now - before)), now

    def end(self) -> None:
        self._is_over = True


@contextmanager
def collected() -> Iterator[None]:
    """As the gateway's own process does when it is ready."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def watched(stack: Stack) -> Iterator[Turns]:
    turns = Turns()
    watching = asyncio.run_coroutine_threadsafe(turns.watch(), stack.loop)
    yield turns
    turns.end()
    watching.result(PATIENCE)


def refused() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What it is, the route and the body: each number far too large, too small, and as very many."""
    for name in NUMBERS:
        for value in (2**31, -1, [2**31] * MANY, {str(token): 1e9 for token in range(MANY)}):
            yield name, COMPLETIONS, {"prompt": "a", name: value}
    yield "stop", COMPLETIONS, {"prompt": "a", "stop": ["x" * 10] * MANY}
    for item in (-1, 2**31, {}, None, [None] * 10, "x"):
        count = BODY_BYTES // (len(json.dumps(item)) + 2) - 10
        yield "prompt", COMPLETIONS, {"prompt": [item] * count}
    hello, names = {"messages": [{"role": "user", "content": "x"}]}, [f"name_{n}" for n in range(MANY)]
    for value in ([], 1, "x"):
        some = dict.fromkeys(names, value)
        yield "chat_template_kwargs", CHAT, {**hello, "chat_template_kwargs": some}
        yield "carrel", CHAT, {**hello, "carrel": some}
        yield "carrel.options", CHAT, {**hello, "carrel": {"options": some}}
        yield "unknown names", CHAT, {**some, "messages": []}
        yield "metadata", "/v1/responses", {"input": 5, "metadata": some}


def test_a_refused_request_holds_up_nobody(tmp_path: Path, model_dir: Path) -> None:
    with (
        running_stack(tmp_path, model_dir, max_model_len=MAX_MODEL_LEN) as stack,
        collected(),
        httpx.Client(base_url=stack.url, timeout=PATIENCE) as http,
    ):
        stack.say("the fox")

        def send(route: str, body: dict[str, Any]) -> None:
            reply = http.post(route, json=body)
            # some take -1
            assert reply.status_code in (200, 400), reply.text

        most: dict[str, float] = {}
        for name, route, body in refused():
            with watched(stack) as turns:
                send(route, body)
            most[name] = max(most.get(name, 0.0), round(turns.longest_ms, 1))
        with watched(stack) as turns, ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda asked: send(*asked[1:]), list(refused())))
        most["eight at once"] = round(turns.longest_ms, 1)
        print(json.dumps({"what": "a refused request holds the loop, ms", **most}))
        assert max(most.values()) < MOST_MS
