"""`/v1/attention` as the owner of a request sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from gateway_stack import Stack
from waiting import PATIENCE

from gateway.attention import MAX_VIEWS, AttentionViews
from gateway.errors import UnknownAttention
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
