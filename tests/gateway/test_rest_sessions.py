"""`/v1/sessions` as a client sees it: its own sessions, warmed, pinned and dropped, and errors that say what to do."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
import httpx
import pytest
from gateway_stack import Stack
from waiting import PATIENCE

SESSIONS = "/v1/sessions"
HELLO = [{"role": "user", "content": "the quick brown fox"}]


def failure(response: httpx.Response) -> tuple[int, str | None, str | int]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


def test_a_session_is_warmed_listed_pinned_and_dropped(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the fox")
    assert http.get(SESSIONS).json() == {"object": "list", "data": []}
    # any text is an id, also one with a slash
    name, path = "docs/über 1", f"{SESSIONS}/docs%2F%C3%BCber%201"
    asked = {
        "messages": HELLO,
        "cache_salt": "s",
        "priority": 2,
        "carrel": {"policy": "pqcache", "budget": 4},
    }
    warmed = http.post(path, json=asked)
    assert warmed.status_code == 200, warmed.text
    num_prompt = http.post("/tokenize", json={"messages": HELLO}).json()["count"]
    whole = num_prompt // 8 * 8
    card = {
        "id": name,
        "object": "session",
        "model": "tiny",
        "tokens": whole,
        "bytes": whole * 512,
        "created_at": 1,
        "last_used_at": 2,
        "pinned": False,
        "expires_at": None,
    }
    told = warmed.json().pop("warmed")
    assert warmed.json() == {**card, "warmed": told}
    assert (told["prompt_tokens"], told["cached_tokens"]) == (num_prompt, 3)
    assert told["seconds"] > 0
    [sent] = script.requests
    assert (sent.session_id, sent.cache_salt, sent.priority) == (name, "s", 2)
    assert (sent.policy, sent.budget.tokens, sent.sampling.max_tokens) == ("pqcache", 4, 1)
    assert http.get(path).json() == card

    pinned = http.post(path, json={"pinned": True, "ttl_seconds": 60}).json()
    assert (pinned["pinned"], pinned["expires_at"], pinned["warmed"]) == (True, 60, None)
    both = http.post(f"{SESSIONS}/2", json={"prompt": list(range(9)), "pinned": True}).json()
    assert (both["tokens"], both["pinned"], both["expires_at"]) == (8, True, None)
    assert [each["id"] for each in http.get(SESSIONS).json()["data"]] == ["2", name]
    assert http.post(path, json={"pinned": False}).json()["pinned"] is False

    # a request that names it is one of it
    http.post("/v1/completions", json={"prompt": list(range(17)), "session_id": name})
    assert http.get(path).json()["tokens"] == 16

    assert http.delete(path).json() == {"id": name, "object": "session.deleted", "deleted": True}
    for again in (http.delete(path), http.get(path), http.post(path, json={"pinned": True})):
        assert failure(again) == (404, "session_id", "session_not_found")
    assert [each["id"] for each in http.get(SESSIONS).json()["data"]] == ["2"]


def test_nobody_sees_or_changes_the_sessions_of_another_key(locked_stack: Stack) -> None:
    locked_stack.say("the fox")
    path = f"{SESSIONS}/chat"

    def ask(key: str, method: str, where: str, body: dict[str, Any] | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, locked_stack.url + where, json=body, headers=headers, timeout=PATIENCE)

    assert ask("right-key", "POST", path, {"prompt": list(range(8))}).status_code == 200
    assert ask("other-key", "GET", SESSIONS).json()["data"] == []
    for method, body in (("GET", None), ("DELETE", None), ("POST", {"pinned": True})):
        assert failure(ask("other-key", method, path, body)) == (404, "session_id", "session_not_found")
    assert ask("other-key", "POST", path, {"prompt": list(range(16))}).json()["tokens"] == 16
    assert [each["tokens"] for each in ask("right-key", "GET", SESSIONS).json()["data"]] == [8]


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("x" * 129, {"pinned": True}, "session_id"),
        ("", {"pinned": True}, "session_id"),
        ("a%00b", {"pinned": True}, "session_id"),
        ("a", {}, "prompt"),
        ("a", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("a", {"prompt": ""}, "prompt"),
        ("a", {"prompt": [10**6]}, "prompt"),
        ("a", {"messages": []}, "messages"),
        ("a", {"prompt": "a", "ttl_seconds": 5}, "ttl_seconds"),
        ("a", {"pinned": True, "ttl_seconds": 0}, "ttl_seconds"),
        ("a", {"pinned": True, "ttl_seconds": 10**9}, "ttl_seconds"),
        ("a", {"prompt": "a", "carrel": {"policy": "none"}}, "carrel.policy"),
    ],
)
def test_what_is_wrong_is_named(
    http: httpx.Client, stack: Stack, name: str, body: dict[str, Any], param: str
) -> None:
    stack.say("the fox")
    if body.get("prompt") == [10**6]:
        # the worker knows which ids there are
        refusal = (grpc.StatusCode.INVALID_ARGUMENT, "no such id", (("carrel-param", "prompt"),))
        stack.say("the fox", fail_at=0, fail_with=refusal)
    assert failure(http.post(f"{SESSIONS}/{name}", json=body))[:2] == (400, param)


def test_what_is_not_kept_says_why(http: httpx.Client, stack: Stack) -> None:
    script, path = stack.say("the fox"), f"{SESSIONS}/a"

    def refused(body: dict[str, Any]) -> str:
        response = http.post(path, json=body)
        assert failure(response) == (400, "prompt", "session_not_kept")
        return response.json()["error"]["message"]

    assert "whole slabs, of 8 tokens" in refused({"prompt": list(range(7))})
    assert http.post(path, json={"prompt": list(range(40))}).json()["tokens"] == 40
    script.has_room = False
    # what it held before is not taken for this
    assert "--arena-bytes" in refused({"prompt": list(range(16))})
    http.post(path, json={"pinned": True})
    assert "pinned" in refused({"prompt": list(range(60))})
    script.has_room = script.has_pinned_all = True
    response = http.post(path, json={"prompt": list(range(16)), "pinned": True})
    assert failure(response) == (400, "pinned", "pin_limit")
    assert http.get(path).json()["tokens"] == 16


@pytest.mark.parametrize(
    ("away", "code"),
    [({"store_reachable": False}, "store_unavailable"), ({"hangs": True}, "worker_unavailable")],
)
def test_without_store_or_worker_a_client_is_told_so_at_once(
    http: httpx.Client, stack: Stack, away: dict[str, bool], code: str
) -> None:
    script, path = stack.say("the fox", **away), f"{SESSIONS}/a"
    body = {"prompt": list(range(8))}
    for tried in (
        http.get(SESSIONS),
        http.get(path),
        http.delete(path),
        http.post(path, json={"pinned": True}),
        http.post(path, json=body),
    ):
        assert failure(tried) == (503, None, code)
        assert int(tried.headers["retry-after"]) > 0
    # nothing was computed in vain
    assert script.requests == []


def test_the_document_has_the_types(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    paths, schemas = document["paths"], document["components"]["schemas"]

    def answer(path: str, method: str) -> dict[str, Any]:
        content = paths[path][method]["responses"]["200"]["content"]
        return schemas[content["application/json"]["schema"]["$ref"].rpartition("/")[2]]["properties"]

    assert "data" in answer(SESSIONS, "get")
    one = f"{SESSIONS}/{{session_id}}"
    assert {"id", "tokens", "bytes", "pinned"} <= set(answer(one, "get"))
    assert "warmed" in answer(one, "post")
    assert "deleted" in answer(one, "delete")
    assert [each["name"] for each in paths[one]["delete"]["parameters"]] == ["session_id"]


PLAIN = {"/v1/chat/completions": {"messages": HELLO}, "/v1/completions": {"prompt": "the quick brown fox"}}
ASKED_WITH_KEY = {**PLAIN, "/v1/responses": {"input": "the quick brown fox"}}
DIGEST = hashlib.sha256(b"k" * 129).hexdigest()


@pytest.mark.parametrize(
    ("path", "fields", "session"),
    [
        *[(path, {"prompt_cache_key": "thread 1"}, "thread 1") for path in ASKED_WITH_KEY],
        *[(path, {"prompt_cache_key": "k" * 129}, DIGEST) for path in ASKED_WITH_KEY],
        *[(path, {"prompt_cache_key": "k", "session_id": "own"}, "own") for path in PLAIN],
        *[(path, {"prompt_cache_key": ""}, "") for path in PLAIN],
        ("/v1/responses", {"prompt_cache_key": "k", "store": False}, "k"),
    ],
)
def test_a_cache_key_names_the_session_of_a_request_without_one(
    http: httpx.Client, stack: Stack, path: str, fields: dict[str, Any], session: str
) -> None:
    stack.say("the fox")
    reply = http.post(path, json={**ASKED_WITH_KEY[path], **fields})
    assert reply.status_code == 200, reply.text
    assert stack.script.requests[0].session_id == session


def test_a_cache_key_is_the_callers_own_and_a_conversation_keeps_its_session(locked_stack: Stack) -> None:
    locked_stack.say("the fox")
    first, *_ = [
        httpx.post(
            f"{locked_stack.url}/v1/responses",
            json={"input": "hello there", "prompt_cache_key": "shared"},
            headers={"Authorization": f"Bearer {key}"},
            timeout=PATIENCE,
        ).json()
        for key in ("right-key", "other-key")
    ]
    one, other = locked_stack.script.requests
    assert one.session_id == other.session_id == "shared"
    assert one.prefix_salt != other.prefix_salt
    assert set(locked_stack.script.sessions) == {one.prefix_salt, other.prefix_salt}
    httpx.post(
        f"{locked_stack.url}/v1/responses",
        json={"input": "why?", "prompt_cache_key": "another", "previous_response_id": first["id"]},
        headers={"Authorization": "Bearer right-key"},
        timeout=PATIENCE,
    )
    assert locked_stack.script.requests[-1].session_id == "shared"
