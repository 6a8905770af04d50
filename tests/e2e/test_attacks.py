"""Attacks on a real server, by `make faults`: who leaves, who floods, and what a stranger's times tell."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import httpx
import pytest
from figures import since, tell
from questions import ask
from serving import Serving, serving
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

MINE, OTHERS = "mine-0123456789abcdef", "others-0123456789abcdef"
NUM_LEAVING, NUM_AT_ONCE = 200, 24
# ten times what the server lets in
MOST, NUM_FLOODING = 8, 80


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def body(text: str, max_tokens: int, **more: object) -> dict[str, object]:
    return {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def first_token_s(server: Serving, key: str, text: str) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were known."""
    begin, first, cached = time.monotonic(), 0.0, 0
    asked = body(text, 2, stream=True, stream_options={"include_usage": True})
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=asked, headers=headers(key), timeout=PATIENCE) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic() - begin
                usage = json.loads(line[6:]).get("usage") or {}
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
    return first, cached


def leave(server: Serving, number: int) -> int:
    """After some pieces of an answer; how many those were."""
    asked, seen = body(f"Boat {number} came home", 300, stream=True), 0
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=asked, headers=headers(MINE), timeout=PATIENCE) as reply:
        assert reply.status_code in (200, 429, 503)
        for line in reply.iter_lines():
            seen += line.startswith("data: {")
            if seen > number % 7:
                break
    return seen


def is_idle(server: Serving) -> Callable[[], bool]:
    def check() -> bool:
        worker = server.worker_stats()
        return not (worker.running or worker.waiting or worker.slot_used_tokens) and (
            server.store_stats().leased_bytes == 0
        )

    return check


def refusal(server: Serving, number: int) -> tuple[int, float, str]:
    """The status, the seconds until it came, and the error's code."""
    begin = time.monotonic()
    url, asked = f"{server.url}/v1/completions", body(f"Ship {number} lay in the bay", 100)
    reply = httpx.post(url, json=asked, headers=headers(MINE), timeout=PATIENCE)
    code = "" if reply.status_code == 200 else str(reply.json()["error"]["code"])
    return reply.status_code, time.monotonic() - begin, code


def check_keys_are_not_shown(server: Serving) -> None:
    """Neither in the log, nor in the arguments of a process that it started, nor in what it answers."""
    shown = [server.log.read_text(), *(" ".join(each.cmdline()) for each in server.descendants())]
    for path in ("/server_info", "/load", "/metrics", "/v1/models", "/openapi.json"):
        shown.append(httpx.get(f"{server.url}{path}", headers=headers(MINE), timeout=PATIENCE).text)
        # a wrong key, of which a right one is a part
        shown.append(httpx.get(f"{server.url}{path}", headers=headers(f"{MINE}x"), timeout=PATIENCE).text)
    shown.append(httpx.get(f"{server.url}/v1/models?api_key={MINE}", timeout=PATIENCE).text)
    assert len(server.descendants()) > 3
    assert not [text[:300] for text in shown if MINE in text or OTHERS in text]


def flood(server: Serving, number: int) -> int:
    """A prompt that nobody asked before; how many of its tokens were known."""
    asked = body(ask(1200, seed=200 + number).text, 1)
    url = f"{server.url}/v1/completions"
    reply = httpx.post(url, json=asked, headers=headers(OTHERS), timeout=PATIENCE)
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_key_that_floods_leaves_what_another_uses() -> None:
    # 64 MiB hold some nine such prompts
    options = ("--no-warmup", "--slab-bytes", "256KiB", "--api-key", f"{MINE},{OTHERS}")
    with serving(*options, arena="96MiB") as server:
        documents = [ask(1200, seed=50 + number).text for number in range(4)]
        for text in documents:
            first_token_s(server, MINE, text)
        for number in range(24):
            flood(server, number)
        assert server.store_stats().evicted_bytes > 0
        hits = [first_token_s(server, MINE, text)[1] for text in documents]
        tell("24 prompts of another key, then one's own four again", cached=hits)
        assert min(hits) > 1000


def test_who_leaves_floods_or_listens_gets_nothing() -> None:
    keys = ("--api-key", f"{MINE},{OTHERS}", "--max-concurrent", str(MOST))
    with serving("--no-warmup", "--slab-bytes", "256KiB", "--log-level", "debug", *keys) as server:
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            seen = list(pool.map(lambda number: leave(server, number), range(NUM_LEAVING)))
        begin = time.monotonic()
        wait_until(is_idle(server), poll=0.1)
        tell("left", num=len(seen), served=sum(each > 0 for each in seen), idle_after_s=since(begin))
        assert any(seen)

        with ThreadPoolExecutor(NUM_FLOODING) as pool:
            told = list(pool.map(lambda number: refusal(server, number), range(NUM_FLOODING)))
        counts = Counter((status, code) for status, _, code in told)
        assert counts[200, ""] >= MOST
        assert set(counts) <= {(200, ""), (503, "overloaded"), (429, "too_many_requests")}
        refused = sorted(seconds for status, seconds, _ in told if status != 200)
        p50, p95 = (refused[int(share * len(refused))] for share in (0.5, 0.95))
        tell("flooded", num=NUM_FLOODING, refused=len(refused), p50_s=p50, p95_s=p95, most_s=refused[-1])
        wait_until(is_idle(server), poll=0.1)

        # what one key has asked, another key asks: no token is known, and it takes as long as what nobody asked
        known, strange, fresh, again = [], [], [], []
        for number in range(8):
            text, other = ask(1200, seed=50 + number).text, ask(1200, seed=80 + number).text
            known.append(first_token_s(server, MINE, text))
            strange.append(first_token_s(server, OTHERS, text))
            fresh.append(first_token_s(server, OTHERS, other))
            again.append(first_token_s(server, MINE, text))
        assert {cached for _, cached in (*strange, *fresh)} == {0}
        assert all(cached > 0 for _, cached in again)
        check_keys_are_not_shown(server)
        times = {"known to another key": strange, "known to nobody": fresh, "known to this key": again}
        medians = {what: round(median(s for s, _ in each), 3) for what, each in times.items()}
        tell("a first token", **medians)
