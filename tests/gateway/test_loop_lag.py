"""How long a body holds up everybody else, by `make faults`: processor time of the event loop's thread."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stack import Stack, running_stack
from waiting import PATIENCE

from gateway.json_limits import MAX_NESTED, MAX_TEXTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# What may go by until others have their turn.
MOST_MS = 100.0
# A body may have four mebibytes; of those that are refused each has one.
MAX_MODEL_LEN, BODY_BYTES, MANY = 131_072, 1 << 20, 40_000
MILLION = 2**20
# a little less than a body may have
NUM_NESTED, NUM_TEXTS = MAX_NESTED - 20, MAX_TEXTS - 20
NUMBERS = ("n", "best_of", "max_tokens", "logprobs", "top_k", "min_tokens", "seed", "prompt_logprobs", "stop")
NUMBERS += ("temperature", "top_p", "presence_penalty", "repetition_penalty", "logit_bias", "priority")
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


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
    """Yield name, route and body of requests to refuse: each number far too large, too small, and very many."""
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


def well_formed() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, route and body of valid requests that have as much of each thing as is read."""
    hello, ids, many = {"role": "user", "content": "x"}, [5] * (MAX_MODEL_LEN - 10), NUM_NESTED // 2
    for text in ("the fox ", "é", '\\"{[,'):
        escaped = json.dumps(text)[1:-1]
        long = text * (4 * BODY_BYTES // len(escaped) - 100)
        yield "a text", CHAT, {"messages": [{"role": "user", "content": long}]}
        yield "a text", COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": 100}
        yield "a text", "/tokenize", {"prompt": long}
    for fields in ({}, {"echo": True}, {"n": 8}, {"return_token_ids": True}):
        yield "token ids", COMPLETIONS, {"prompt": ids, "max_tokens": 4, **fields}
        yield "lists of token ids", COMPLETIONS, {"prompt": [ids[:16_000]] * 8, "max_tokens": 4, **fields}
    yield "token ids to tell", "/detokenize", {"tokens": ids * 2}
    yield "messages", CHAT, {"messages": [hello] * (NUM_TEXTS // 4)}
    yield "messages", RESPONSES, {"input": [hello] * (NUM_TEXTS // 4)}
    yield "messages", "/v1/messages", {"messages": [hello] * (NUM_TEXTS // 4), "max_tokens": 4}
    yield "messages", "/tokenize", {"messages": [hello] * (NUM_TEXTS // 4)}
    parts = [{"type": "text", "text": "x"}] * (NUM_TEXTS // 4)
    yield "parts", CHAT, {"messages": [{"role": "user", "content": parts}]}
    call = {"type": "function_call", "call_id": "", "name": "f"}
    yield "calls", RESPONSES, {"input": [call] * (NUM_TEXTS // 6)}
    called = {"id": "", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "x", "tool_calls": [called] * (NUM_TEXTS // 8)}
    yield "calls", CHAT, {"messages": [hello, said]}
    yield "items", RESPONSES, {"input": [{}] * NUM_NESTED}
    yield "stop", COMPLETIONS, {"prompt": "x", "stop": ["x"] * NUM_TEXTS}
    names = [f"name_{at}" for at in range(NUM_TEXTS // 2)]
    yield "metadata", RESPONSES, {"input": "x", "metadata": dict.fromkeys(names, "")}
    yield "chat_template_kwargs", CHAT, {"messages": [hello], "chat_template_kwargs": dict.fromkeys(names, 1)}
    for schema in ({"a": [[]] * NUM_NESTED}, {name: {} for name in names[:many]}):
        yield "a schema", CHAT, {"messages": [hello], "guided_json": schema}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        yield "a tool", CHAT, {"messages": [hello], "tools": [tool]}


def a_million() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, route and body of requests with token ids for a context of a million."""
    ids = [at % 200 for at in range(MILLION - 10)]
    for fields in ({}, {"stream": True}, {"echo": True}, {"n": 4}, {"truncate_prompt_tokens": 100}):
        yield "a prompt", COMPLETIONS, {"prompt": ids, "max_tokens": 4, **fields}
    for fields in ({}, {"stream": True}):
        told = {"return_token_ids": True, **fields}
        yield "a prompt that is told", COMPLETIONS, {"prompt": ids, "max_tokens": 4, **told}
        prompts = [ids[:16_000]] * 64
        yield "64 prompts that are told", COMPLETIONS, {"prompt": prompts, "max_tokens": 4, **told}
    yield "ids to tell", "/detokenize", {"tokens": ids}
    yield "a session", "/v1/sessions/a", {"prompt": ids}
    for wrong in (-1, 2**32, 1.5, None):
        yield "with one that is none", COMPLETIONS, {"prompt": [*ids, wrong]}
        yield "with one that is none", "/detokenize", {"tokens": [*ids, wrong]}
    yield "stop_token_ids", COMPLETIONS, {"prompt": "x", "stop_token_ids": ids}


def in_pieces(url: httpx.URL, size: int) -> int:
    """The status of a body in chunks of this size."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk, body = b"%x\r\n%s\r\n" % (size, b" " * size), b'{"prompt": "x", "max_tokens": 4}'
    with socket.create_connection((url.host, url.port), timeout=PATIENCE) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        connection.sendall(chunk * (BODY_BYTES // len(chunk)) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        return int(connection.recv(100).split()[1])


@pytest.mark.parametrize(
    ("what", "asked", "longest"),
    [
        ("refused", refused, MAX_MODEL_LEN),
        ("well-formed", well_formed, MAX_MODEL_LEN),
        ("million ids'", a_million, MILLION),
    ],
)
def test_a_body_holds_up_nobody(
    tmp_path: Path,
    model_dir: Path,
    what: str,
    asked: Callable[[], Iterator[tuple[str, str, dict[str, Any]]]],
    longest: int,
) -> None:
    with (
        running_stack(tmp_path, model_dir, max_model_len=longest) as stack,
        collected(),
        httpx.Client(base_url=stack.url, timeout=PATIENCE) as http,
    ):
        stack.say("the fox")

        def send(route: str, body: dict[str, Any]) -> None:
            reply = http.post(route, json=body)
            # some take -1; the worker is of this process, and as busy
            assert reply.status_code in (200, 400, 413, 503), reply.text

        most: dict[str, float] = {}
        for name, route, body in asked():
            with watched(stack) as turns:
                send(route, body)
            most[name] = max(most.get(name, 0.0), round(turns.longest_ms, 1))
        with watched(stack) as turns, ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda one: send(*one[1:]), list(asked())))
        eight = round(turns.longest_ms, 1)
        for size in (1, 100):
            with watched(stack) as turns:
                assert in_pieces(httpx.URL(stack.url), size) == 200
            most[f"chunks of {size}"] = round(turns.longest_ms, 1)
        print(json.dumps({"what": f"a {what} request holds the loop, ms", **most, "eight at once": eight}))
        assert max(most.values()) < MOST_MS
        assert eight < 2 * MOST_MS
