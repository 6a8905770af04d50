"""Keys from a file: what each may have, what it is told, and what operators see of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from gateway_stack import Stack, running_stack
from waiting import PATIENCE, wait_until

from gateway.auth import KeyRing
from gateway.errors import ConfigError, TooManyRequests
from gateway.key_file import KeyFile, read_keys
from gateway.rate_limits import RateLimits
from gateway.v1 import chat_pb2 as pb
from gateway.v1 import chat_pb2_grpc

KEYS = """
- {name: few, key: few-key, requests-per-minute: 2}
- {name: short, key: short-key, tokens-per-minute: 100}
- {name: small, key: small-key, arena-bytes: 300}
- {name: one, key: one-key, max-concurrent: 1}
- {name: free, key: free-key, weight: 3}
"""


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[tuple[Stack, Path]]:
    folder = tmp_path_factory.mktemp("keyed")
    path = folder / "keys.yaml"
    path.write_text(KEYS)
    with running_stack(folder, model_dir, api_keys_file=path) as stack:
        yield stack, path


def ask(stack: Stack, key: str, prompt: str = "a", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": prompt, "max_tokens": 4, **fields}
    return httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)


def limited(keys: str, tmp_path: Path, clock: Clock) -> tuple[RateLimits, bytes]:
    path = tmp_path / "keys.yaml"
    path.write_text(keys)
    ring = KeyRing(file=KeyFile(path, clock))
    caller = ring.caller("Bearer k")
    assert caller is not None
    return RateLimits(ring, clock), caller


def test_a_minutes_requests_come_back_one_by_one(tmp_path: Path) -> None:
    clock = Clock()
    limits, caller = limited("- {name: n, key: k, requests-per-minute: 3}", tmp_path, clock)
    for _ in range(3):
        limits.take_request(caller)
    with pytest.raises(TooManyRequests) as refused:
        limits.take_request(caller)
    assert refused.value.retry_after_s == 20
    clock.now += 20
    limits.take_request(caller)
    assert limits.headers(caller) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
    }
    assert limits.headers(b"") == {}


def test_an_answers_tokens_are_missing_afterwards_and_the_longest_prompt_passes_alone(tmp_path: Path) -> None:
    clock = Clock()
    limits, caller = limited("- {name: n, key: k, tokens-per-minute: 600}", tmp_path, clock)
    limits.take_prompt(caller, 5000)
    with pytest.raises(TooManyRequests):
        limits.take_prompt(caller, 1)
    # What was taken beyond the limit is waited for, too.
    clock.now += 441
    limits.take_prompt(caller, 1)
    clock.now += 60
    limits.add_answer(caller, 610)
    with pytest.raises(TooManyRequests) as refused:
        limits.take_prompt(caller, 10)
    assert refused.value.retry_after_s == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be a list"),
        ("- {name: a}", "`key`"),
        ("- {name: a, key: 5}", "quotes"),
        ("- {name: a, key: tell-nobody, requests: 5}", "'requests' is none of"),
        ("- {name: a, key: tell-nobody, arena-bytes: many}", "`arena-bytes`"),
        ("- {name: a, key: tell-nobody, weight: 0}", "`weight`"),
        ("- {name: a, key: tell-nobody}\n- {name: b, key: tell-nobody}", "two keys"),
        ("- {name: a, key: tell-nobody", "no YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_and_its_keys_are_not_shown(
    text: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as refused:
        read_keys(path)
    assert "tell-nobody" not in str(refused.value)


def test_requests_beyond_a_keys_limit_get_429_and_when_to_come_again(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed
    stack.say("the fox")
    first, second, third = (ask(stack, "few-key") for _ in range(3))
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [each.headers["x-ratelimit-remaining-requests"] for each in (first, second, third)] == [
        "1",
        "0",
        "0",
    ]
    assert third.json()["error"]["type"] == "RateLimitError"
    assert 1 <= int(third.headers["retry-after"]) <= 30
    # Others go on, and are told of no limit.
    free = ask(stack, "free-key")
    assert free.status_code == 200
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]
    assert stack.script.requests[-1].weight == 3.0


def test_tokens_of_prompts_and_answers_count_by_either_protocol(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed
    stack.say("the fox")
    assert ask(stack, "short-key", "a " * 60).status_code == 200
    refused = ask(stack, "short-key", "a " * 60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) < 60
    request = pb.ChatRequest(messages=[pb.Message(role="user", content="a " * 60)], max_tokens=4)
    metadata = (("authorization", "Bearer short-key"),)
    with grpc.insecure_channel(stack.grpc_target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(chat_pb2_grpc.ChatStub(channel).Complete(request, timeout=PATIENCE, metadata=metadata))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(caught.value.trailing_metadata())["carrel-retry-after"]) > 0


def test_the_arena_that_a_keys_running_requests_may_fill_is_bounded(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed
    stack.say("the fox")
    # 10 bytes a token: a few tokens of prompt and four of answer fit 300 bytes, 40 of answer do not.
    assert ask(stack, "small-key", max_tokens=40).status_code == 429
    assert ask(stack, "small-key").status_code == 200


def test_keys_are_read_again_and_a_bad_file_changes_nothing(keyed: tuple[Stack, Path]) -> None:
    stack, path = keyed
    stack.say("the fox")
    assert ask(stack, "new-key").status_code == 401
    path.write_text("- {name: [")
    os.utime(path, (1, 1))
    path.write_text(KEYS + "- {name: new, key: new-key}\n")
    wait_until(lambda: ask(stack, "new-key").status_code == 200)
    path.write_text("- {name: [")
    headers = {"Authorization": "Bearer new-key"}
    metrics = httpx.get(f"{stack.url}/metrics", headers=headers, timeout=PATIENCE).text
    assert 'carrel_key_requests_total{key="new",model_name="tiny"} 1.0' in metrics
    assert 'carrel_key_prompt_tokens_total{key="new"' in metrics
    assert 'carrel_key_generation_tokens_total{key="new"' in metrics
    assert "-key" not in metrics
