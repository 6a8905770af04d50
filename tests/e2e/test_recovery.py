"""Processes of a real server are killed, each in turn: it tells so, comes back, and answers as before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from questions import ask
from serving import Serving, is_left, serving
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.slow]

NUM_STREAMS = 8
QUESTION = ask(800, seed=3)
MESSAGES = [{"role": "user", "content": QUESTION.text}]
# of all layers: 2 heads, float32
TOKEN_BYTES = 8 * 2 * 2 * 64 * 4


def answer(server: Serving) -> str:
    reply = server.openai().chat.completions.create(
        model="carrel-nano",
        messages=MESSAGES,
        temperature=0,
        max_tokens=16,
        extra_body={"carrel": {"policy": "pqcache", "budget": 0.2}},
    )
    return reply.choices[0].message.content or ""


def session(
    server: Serving, method: str, body: dict[str, Any] | None = None, name: str = "doc"
) -> dict[str, Any]:
    """Return the server's answer about a session: the question's, or another."""
    return httpx.request(method, f"{server.url}/v1/sessions/{name}", json=body, timeout=PATIENCE).json()


def num_cached(server: Serving, policy: str) -> int:
    """Tokens of the question that were known."""
    body = {"messages": MESSAGES, "max_tokens": 1, "carrel": {"policy": policy}}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def readiness(server: Serving) -> int:
    """The status of /ready; 0 while nobody listens."""
    try:
        return httpx.get(f"{server.url}/ready", timeout=PATIENCE).status_code
    except httpx.HTTPError:
        return 0


def until(is_so: Callable[[], bool], server: Serving) -> None:
    def serves_on() -> bool:
        assert server.process.poll() is None, server.log.read_text()[-4000:]
        return is_so()

    wait_until(serves_on, lambda: server.log.read_text()[-4000:], poll=0.1)


def test_each_process_in_turn_is_killed_and_comes_back_and_eight_streams_drain(tmp_path: Path) -> None:
    # slabs of 256 tokens
    options = ("--shutdown-timeout", "50", "--no-warmup", "--slab-bytes", "256KiB")
    with serving(*options, "--kv-store-path", str(tmp_path)) as server:
        seen = server.descendants()
        warmed = session(server, "POST", {"messages": MESSAGES, "pinned": True})
        assert warmed["warmed"]["prompt_tokens"] - 256 < warmed["tokens"] == warmed["bytes"] // TOKEN_BYTES
        assert num_cached(server, "full") == num_cached(server, "pqcache") == warmed["tokens"]
        # the store hears of requests that have ended before it answers this
        assert session(server, "GET")["pinned"]
        # and trainings that a short request began end after it
        until(lambda: server.store_stats().leased_bytes == 0, server)
        reserved = server.store_stats().reserved_bytes
        assert reserved == warmed["bytes"]
        short = session(server, "POST", {"prompt": [5] * 300}, name="short")
        assert server.store_stats().reserved_bytes - reserved == short["bytes"] == 256 * TOKEN_BYTES
        assert session(server, "DELETE", name="short")["deleted"]
        assert server.store_stats().reserved_bytes == reserved
        before = answer(server)
        assert before.strip().rstrip(".") == QUESTION.answer

        stream = server.stream(QUESTION.text, 4000, policy="pqcache", budget=0.2)
        server.child("gpu_worker").kill()
        with pytest.raises(openai.APIError, match="worker"):
            for _ in stream:
                pass
        assert readiness(server) == 503
        until(lambda: readiness(server) == 200, server)
        assert answer(server) == before

        server.child("gateway").kill()
        until(lambda: readiness(server) == 0, server)
        until(lambda: readiness(server) == 200, server)
        assert answer(server) == before
        # neither a worker nor a gateway takes sessions along
        kept = session(server, "GET")
        assert (kept["tokens"], kept["pinned"]) == (warmed["tokens"], True)
        assert num_cached(server, "pqcache") == kept["tokens"]

        # with no request that would notice
        [actor] = server.actors("StoreActor")
        server.child("kv_store").kill()
        until(lambda: readiness(server) == 503, server)
        until(lambda: readiness(server) == 200, server)
        assert not is_left(actor)
        # what was on the disk is known to the next one
        kept = session(server, "GET")
        assert (kept["tokens"], kept["pinned"]) == (warmed["tokens"], True)
        assert num_cached(server, "pqcache") == kept["tokens"]
        assert answer(server) == before

        stream = server.stream(QUESTION.text, 4000, policy="pqcache", budget=0.2)
        server.actors("StoreActor")[0].kill()
        until(lambda: readiness(server) == 503, server)
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        until(lambda: readiness(server) == 200, server)
        assert answer(server) == before

        log = server.log.read_text()
        for line in (
            "worker ended with signal SIGKILL; lost: the running requests; starting it again in 1 s",
            "gateway ended with signal SIGKILL",
            "store ended with signal SIGKILL",
            "store ended with code 1",
        ):
            assert log.count(line) == 1
        assert "Traceback" not in log
        seen += server.descendants()

        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [server.stream("Once upon a time", 60) for _ in range(NUM_STREAMS)]
            ends = [pool.submit(lambda stream: [*stream][-1].choices[0].finish_reason, s) for s in streams]
            assert server.stop() == 0, server.log.read_text()[-3000:]
            assert [end.result() for end in ends] == ["length"] * NUM_STREAMS
        assert not [process for process in seen if is_left(process)]
        assert not server.run.exists()
