"""`/v1/attention` as the owner of a request sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gateway_stack import Stack, running_stack
from waiting import PATIENCE, wait_until

from gateway.attention import MAX_KEY_READERS, MAX_READERS, MAX_VIEWS, AttentionViews
from gateway.errors import UnknownAttention
from gateway.rest.answers import AttentionAnswer
from gpu_worker.v1 import gpu_worker_pb2 as pb

# Two layers behind a dense one, two heads; buckets of 2, 2 and 1 tokens.
ATTENDED = np.array([[[2, 0, 1], [2, 1, 1]], [[2, 2, 1], [0, 1, 1]]], "<u2")
ON_DEVICE = np.array([[[2, 1, 1], [2, 1, 1]], [[2, 2, 1], [2, 1, 1]]], "<u2")


def sight(step: int = 1, **values: Any) -> pb.Attention:
    fields = {
        "attended": ATTENDED.tobytes(), "on_device": ON_DEVICE.tobytes(), "layers": (1, 3), "kv_heads": 2,
        "dense_layers": 1, "context_tokens": 5, "bucket_tokens": 2, "host_tokens": 5, "shared_tokens": 3,
        "family": "recall", "policy": "pqcache", "hit_rate": 0.75, "bytes_moved": 9, "step": step,
    }  # fmt: skip
    return pb.Attention(**{**fields, **values})


def asked(**values: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "the fox"}], "carrel": {"attention": True}}
    return {**body, **values}


def ask(http: httpx.Client, name: str, **values: Any) -> None:
    http.post("/v1/chat/completions", json=asked(**values), headers={"X-Request-Id": name}).raise_for_status()


def pictures(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def test_what_was_attended_last_is_told_after_the_end_too(http: httpx.Client, stack: Stack) -> None:
    stack.say("the dog", sights=[sight(1), sight(2)])
    ask(http, "r-1", n=2)
    told = http.get("/v1/attention/r-1?stream=false").json()
    assert (told["id"], told["step"], told["policy"], told["family"]) == ("r-1", 2, "pqcache", "recall")
    assert (told["layers"], told["kv_heads"], told["dense_layers"]) == ([1, 3], 2, 1)
    assert (told["hit_rate"], told["bytes_moved"], told["shared_tokens"]) == (0.75, 9, 3)
    # Of buckets of 2, 2 and 1 tokens, the mean over two layers and two heads.
    assert told["attended"] == [0.75, 0.5, 1.0]
    assert told["on_device"] == [1.0, 0.625, 1.0]
    assert http.get("/v1/attention/msg_r-1?stream=false").json() == told
    one = http.get("/v1/attention/chatcmpl-r-1?stream=false&layer=3&head=1").json()
    assert (one["layer"], one["head"], one["attended"]) == (3, 1, [0.0, 0.5, 1.0])
    assert http.get("/v1/attention/r-1?stream=false&layer=0").json()["attended"] == [1.0, 1.0, 1.0]
    with http.stream("GET", "/v1/attention/r-1") as response:
        assert [each if each == "[DONE]" else each["step"] for each in pictures(response)] == [2, "[DONE]"]
    # Only the first of several choices is looked at.
    assert [request.attention for request in stack.script.requests] == [True, False]


def test_it_is_told_while_the_answer_comes(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the dog", sights=[sight(1), sight(2)], is_held=True)
    headers = {"X-Request-Id": "live"}
    with (
        http.stream("POST", "/v1/chat/completions", json=asked(stream=True), headers=headers) as answer,
        httpx.Client(base_url=stack.url, timeout=PATIENCE) as other,
        other.stream("GET", "/v1/attention/live") as response,
    ):
        told = pictures(response)
        assert next(told)["step"] == 1
        script.is_held = False
        assert [each if each == "[DONE]" else each["step"] for each in told] == [2, "[DONE]"]
        assert [*pictures(answer)][-1] == "[DONE]"


def test_who_attends_everything_has_all_of_it(http: httpx.Client, stack: Stack) -> None:
    stack.say("the dog", sights=[sight(attended=b"", on_device=b"", family="dense", dense_layers=0)])
    ask(http, "dense")
    told = http.get("/v1/attention/dense?stream=false").json()
    assert (told["attended"], told["on_device"]) == ([1.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("layer=2", 400, "layer"),
        ("head=2", 400, "head"),
        ("head=-1", 400, "head"),
        ("stream=maybe", 400, "stream"),
    ],
)
def test_what_is_not_there_is_refused(
    query: str, status: int, param: str, http: httpx.Client, stack: Stack
) -> None:
    stack.say("the dog", sights=[sight()])
    ask(http, "r2")
    response = http.get(f"/v1/attention/r2?{query}{'' if 'stream' in query else '&stream=false'}")
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_it_is_the_owners_alone_and_off_unless_asked(locked_stack: Stack) -> None:
    locked_stack.say("the dog", sights=[sight()])
    with httpx.Client(base_url=locked_stack.url, timeout=PATIENCE) as http:
        http.headers["Authorization"] = "Bearer right-key"
        ask(http, "mine")
        ask(http, "plain", carrel={"policy": "pqcache"})
        assert [request.attention for request in locked_stack.script.requests] == [True, False]
        assert http.get("/v1/attention/mine?stream=false").status_code == 200
        plain = http.get("/v1/attention/plain?stream=false")
        http.headers["Authorization"] = "Bearer other-key"
        others = http.get("/v1/attention/mine?stream=false")
        for response in (plain, others):
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (404, "attention_not_found")


def test_only_so_many_are_remembered() -> None:
    views = AttentionViews()
    first = views.open(b"", "0", 9)
    for number in range(1, MAX_VIEWS + 1):
        views.open(b"", str(number), 9)
    assert first.is_over
    with pytest.raises(UnknownAttention):
        views.get(b"", "0")
    assert views.get(b"", "1").request_id == "1"


def readers(stack: Stack, key: str, name: str, count: int, closing: ExitStack) -> list[httpx.Response]:
    """Open `count` streams of one view, which stay open until `closing` ends."""
    headers = {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    http = closing.enter_context(
        httpx.Client(base_url=stack.url, timeout=PATIENCE, headers=headers, limits=limits)
    )
    return [closing.enter_context(http.stream("GET", f"/v1/attention/{name}")) for _ in range(count)]


def test_each_picture_is_drawn_once_for_all_its_readers(
    http: httpx.Client, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = stack.say("the dog", sights=[sight(1), sight(2)], is_held=True)
    drawn, write = [], AttentionAnswer.written

    def counted(answer: AttentionAnswer) -> bytes:
        drawn.append((answer.step, answer.layer))
        return write(answer)

    monkeypatch.setattr(AttentionAnswer, "written", counted)
    with ExitStack() as closing:
        headers = {"X-Request-Id": "many"}
        asking = http.stream("POST", "/v1/chat/completions", json=asked(stream=True), headers=headers)
        answer = closing.enter_context(asking)
        streams = [
            each for name in ("many", "many?layer=3") for each in readers(stack, "none", name, 10, closing)
        ]
        told = [pictures(each) for each in streams]
        assert {next(each)["step"] for each in told} == {1}
        script.is_held = False
        assert all([*each][-1] == "[DONE]" for each in told)
        assert [*pictures(answer)][-1] == "[DONE]"
    assert sorted(drawn, key=str) == [(1, 3), (1, None), (2, 3), (2, None)]


def test_readers_are_bounded_for_a_key_and_in_all(tmp_path: Path, model_dir: Path) -> None:
    keys = [f"key-{at}" for at in range(MAX_READERS // MAX_KEY_READERS + 1)]
    with running_stack(tmp_path, model_dir, api_keys=tuple(keys)) as stack, ExitStack() as closing:
        script = stack.say("the dog", sights=[sight()], hang_at=1)
        for key in keys:
            headers = {"X-Request-Id": "seen", "Authorization": f"Bearer {key}"}
            http = closing.enter_context(httpx.Client(base_url=stack.url, timeout=PATIENCE, headers=headers))
            closing.enter_context(http.stream("POST", "/v1/chat/completions", json=asked(stream=True)))
        *full, last = keys
        first_leaves = ExitStack()
        for key in full:
            streams = readers(
                stack, key, "seen", MAX_KEY_READERS + 1, first_leaves if key == keys[0] else closing
            )
            assert [each.status_code for each in streams] == [200] * MAX_KEY_READERS + [429]
            error = json.loads(streams[-1].read())["error"]
            assert (error["code"], error["type"]) == ("too_many_requests", "RateLimitError")
            assert int(streams[-1].headers["retry-after"]) > 0
            newest = httpx.get(
                f"{stack.url}/v1/attention/seen?stream=false",
                headers={"Authorization": f"Bearer {key}"},
                timeout=PATIENCE,
            )
            assert newest.json()["step"] == 1
        (refused,) = readers(stack, last, "seen", 1, closing)
        assert (refused.status_code, json.loads(refused.read())["error"]["code"]) == (503, "overloaded")
        first_leaves.close()
        wait_until(lambda: readers(stack, last, "seen", 1, closing)[0].status_code == 200)
        script.hang_at = None
