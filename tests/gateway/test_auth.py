"""Test whose requests share work: the worker shares computed prefixes among the requests of one key."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx
import pytest
from gateway_stack import Stack, running_stack
from waiting import PATIENCE

from gateway.auth import KeyRing
from gateway.key_file import KeyFile
from gateway.v1 import chat_pb2 as pb
from gateway.v1 import chat_pb2_grpc

KEY = "Bearer right-key"


def test_a_caller_is_known_by_the_key_and_the_key_not_by_the_caller() -> None:
    ring = KeyRing(["alpha", "beta"])
    alpha, beta = ring.caller("Bearer alpha"), ring.caller("bearer beta")
    assert alpha is not None
    assert beta is not None
    assert len({alpha, beta}) == 2
    assert (len(alpha), len(beta)) == (32, 32)
    assert b"alpha" not in alpha
    # The same after a restart, and in another gateway with other keys beside.
    assert KeyRing(["gamma", "alpha"]).caller("Bearer alpha") == alpha


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer wrong", "alpha", "Basic alpha"])
def test_without_a_key_there_is_no_caller(authorization: str | None) -> None:
    assert KeyRing(["alpha"]).caller(authorization) is None


@pytest.mark.parametrize("says", [True, False])
def test_a_comparison_in_constant_time_decides_and_every_key_is_compared(
    says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(shown: bytes, known: bytes) -> bool:
        compared.append((shown, known))
        return says

    monkeypatch.setattr("hmac.compare_digest", compare)
    ring = KeyRing(["alpha", "beta", "gamma"])
    for key in ("alpha", "gamma", "wrong"):
        compared.clear()
        # What it says holds, also where the key is another.
        assert (ring.caller(f"Bearer {key}") is not None) is says
        assert len({known for _, known in compared}) == 3
        assert {(len(shown), len(known)) for shown, known in compared} == {(32, 32)}


def test_where_everyone_may_pass_all_are_one() -> None:
    assert KeyRing([]).caller(None) == KeyRing([]).caller("Bearer anything") == b""


def test_a_keys_weight_is_found_by_its_caller_and_reaches_the_worker(tmp_path: Path, model_dir: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a, key: alpha, weight: 3}\n- {name: b, key: beta}\n")
    ring = KeyRing(file=KeyFile(file))
    assert [ring.weight(ring.caller(f"Bearer {key}") or b"") for key in ("alpha", "beta")] == [3.0, 1.0]
    assert ring.weight(b"") == KeyRing(["alpha"]).weight(b"") == 1.0
    with running_stack(tmp_path, model_dir, api_keys_file=file) as stack:
        script = stack.say("the fox")
        for key in ("alpha", "beta"):
            headers = {"Authorization": f"Bearer {key}"}
            httpx.post(f"{stack.url}/v1/completions", json={"prompt": "a"}, headers=headers, timeout=PATIENCE)
        assert [each.weight for each in script.requests] == [3.0, 1.0]


def test_the_worker_learns_of_the_caller_by_either_protocol(locked_stack: Stack) -> None:
    script = locked_stack.say("the fox")
    with httpx.Client(base_url=locked_stack.url, headers={"Authorization": KEY}, timeout=PATIENCE) as http:
        messages = [{"role": "user", "content": "hello"}]
        assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": ["one", "two"]}).status_code == 200
    with grpc.insecure_channel(locked_stack.grpc_target) as channel:
        request = pb.ChatRequest(
            messages=[pb.Message(role="user", content="hello")], session_id="a chat", cache_salt="salt"
        )
        assert list(
            chat_pb2_grpc.ChatStub(channel).Complete(
                request, timeout=PATIENCE, metadata=(("authorization", KEY),)
            )
        )
    assert len(script.requests) == 4
    assert [one.session_id for one in script.requests] == ["", "", "", "a chat"]
    assert [one.cache_salt for one in script.requests] == ["", "", "", "salt"]
    assert {one.prefix_salt for one in script.requests} == {KeyRing(["right-key"]).caller(KEY)}


def test_a_header_that_comes_twice_shows_no_key(locked_stack: Stack) -> None:
    """A proxy may check the one that the server does not read."""
    right, wrong = "Bearer right-key", "Bearer wrong"
    for values in ([right, wrong], [wrong, right], [right, right]):
        for name in ("authorization", "x-api-key"):
            headers = [(name, value if name == "authorization" else value[7:]) for value in values]
            refused = httpx.get(f"{locked_stack.url}/v1/models", headers=headers, timeout=PATIENCE)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        metadata = tuple(("authorization", value) for value in values)
        with grpc.insecure_channel(locked_stack.grpc_target) as channel:
            chat = chat_pb2_grpc.ChatStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                chat.ListModels(pb.ListModelsRequest(), timeout=PATIENCE, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for name, value in (("authorization", right), ("x-api-key", "right-key")):
        assert httpx.get(f"{locked_stack.url}/v1/models", headers={name: value}).status_code == 200


def test_an_open_gateway_names_nobody(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the fox")
    assert http.post("/v1/completions", json={"prompt": "one"}).status_code == 200
    assert [one.prefix_salt for one in script.requests] == [b""]
