from __future__ import annotations

import asyncio
import codecs
import gzip
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import httpx
import pytest
from gateway_stack import Stack, running_stack, write_tokenizer
from waiting import PATIENCE, wait_until

from carrel.sse import chunks
from gateway.body_limits import BodyLimit
from gateway.config import GatewayConfig
from gateway.rest.middleware import UNGUARDED_PATHS
from gateway.service import ChatService
from gateway.tokenizer import load_tokenizer
from gateway.v1 import chat_pb2, chat_pb2_grpc
from gateway.worker_client import LOOKS, own_edition
from gpu_worker.v1 import gpu_worker_pb2 as pb

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 16_000
    assert "/" + "work" not in response.text
    assert ".py" not in response.text
    assert response.headers["x-request-id"]
    return body["error"]


def test_frames_of_a_stream(http: httpx.Client, stack: Stack) -> None:
    stack.say("the fox")
    body = {"messages": HELLO, "stream": True}
    response = http.post(CHAT, json=body, headers={"X-Request-Id": "my-id.1"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"] == "my-id.1"
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    said = list(chunks(response))
    assert said[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert said[0]["id"] == "chatcmpl-my-id.1"
    assert said[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in said)


@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": [1, 2, 3, 4, 5]})]
)
def test_a_stream_tells_how_far_its_prompt_is_if_asked(
    http: httpx.Client, stack: Stack, path: str, prompt: dict[str, Any]
) -> None:
    def stream(options: dict[str, Any]) -> list[dict[str, Any]]:
        stack.say("the fox", progress=[(0, 2), (num_prompt - 2, 2)])
        return list(chunks(http.post(path, json={**prompt, "stream": True, "stream_options": options})))

    num_prompt = 5 if "prompt" in prompt else http.post("/tokenize", json=prompt).json()["count"]
    said = stream({"include_progress": True})
    told = [chunk for chunk in said if "carrel" in chunk]
    assert [chunk["carrel"] for chunk in told] == [
        {"progress": {"prompt_tokens": num_prompt, "computed_tokens": computed, "cached_tokens": 2}}
        for computed in (0, num_prompt - 2)
    ]
    assert said[:2] == told
    assert all(chunk["choices"] == [] and chunk["object"] == said[-1]["object"] for chunk in told)
    assert said[-1]["choices"][0]["finish_reason"] == "stop"
    for options in ({}, {"include_progress": False}, {"include_usage": True}):
        assert not any("carrel" in chunk for chunk in stream(options))


def test_error_frame_then_done(http: httpx.Client, stack: Stack) -> None:
    stack.say("the fox", fail_at=1)
    response = http.post(CHAT, json={"messages": HELLO, "stream": True})
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    assert list(chunks(response))[-1]["error"]["code"] == "generation_failed"


def test_heartbeat_while_the_worker_is_silent(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the fox", is_silent=True)
    with http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response:
        text = response.iter_text()
        assert next(text).startswith(": ping\n\n")
        script.is_silent = False
        assert "".join(text).endswith("data: [DONE]\n\n")


def test_request_id_is_sanitised(http: httpx.Client) -> None:
    for bad in ("a b", "x" * 200, "<script>"):
        echoed = http.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert echoed != bad
        assert echoed.isalnum()


@pytest.mark.parametrize(
    ("path", "asked", "written"),
    [
        (CHAT, {"messages": HELLO}, "chatcmpl-own.1"),
        ("/v1/completions", {"prompt": "a"}, "cmpl-own.1"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}, "msg_own.1"),
        ("/v1/responses", {"input": "a"}, None),
    ],
)
def test_a_body_may_say_the_request_id(
    http: httpx.Client, stack: Stack, path: str, asked: dict[str, Any], written: str | None
) -> None:
    script = stack.say("the")
    response = http.post(path, json={**asked, "request_id": "own.1"})
    assert response.headers["x-request-id"] == "own.1"
    assert written is None or response.json()["id"] == written
    assert script.requests[0].request_id.startswith("own.1-")
    named = http.post(path, json={**asked, "request_id": "own.1"}, headers={"X-Request-Id": "first"})
    assert named.headers["x-request-id"] == "first"
    refused = http.post(path, json={**asked, "request_id": "a b"})
    assert refused.status_code == 400


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("hang_at", [0, 2])
def test_disconnect_cancels_the_worker(stack: Stack, is_stream: bool, hang_at: int) -> None:
    script = stack.say("the quick brown fox", hang_at=hang_at)
    body = json.dumps({"messages": HELLO, "stream": is_stream}).encode()
    address = httpx.URL(stack.url)
    with socket.create_connection((address.host, address.port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(script.requests) == 1)
        if is_stream:
            connection.settimeout(PATIENCE)
            assert b"200 OK" in connection.recv(100)
    wait_until(lambda: script.num_cancelled == 1)
    wait_until(lambda: stack.service.admission.num_running == 0)


@pytest.mark.parametrize(
    ("path", "asked"), [(CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "the"})]
)
def test_the_newer_name_of_max_tokens_goes_before_the_older(
    http: httpx.Client, stack: Stack, path: str, asked: dict[str, Any]
) -> None:
    script = stack.say("the fox")
    for fields in ({"max_completion_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 5}):
        assert http.post(path, json={**asked, **fields}).status_code == 200
    assert [request.sampling.max_tokens for request in script.requests] == [7, 7]


HOSTILE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe\x00",
    b'{"messages": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
    b'{"messages": [{"role": "user", "content": "x"}], "carrel": {"budget": NaN}}',
    b'{"messages": [{"role": "user", "content": "\\u0000"}]}',
    b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": [], "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": "x"}], "n": ' + b"-" + b"9" * 100 + b"}",
    b'{"messages": ' + json.dumps([{"role": 5, "content": "x" * 50}] * 2000).encode() + b"}",
    b'{"messages": "a", "messages": 5}',
    b'{"prompt": [[' + b"1.5," * 1000 + b"1]]}",
    b'{"prompt": []}',
    b'{"prompt": [[]]}',
    b'{"prompt": [99999999999999999999999]}',
    b'{"prompt": ["a", 5]}',
    b'{"prompt": "\\u0000"}',
    json.dumps({"prompt": ["a"] * 65}).encode(),
    b'{"prompt": "a", "max_tokens": 0}',
    b'{"prompt": "a", "best_of": 5}',
    b'{"prompt": "a", "suffix": "b"}',
    b'{"prompt": ["1", 2]}',
    b'{"prompt": "a", "logprobs": "all"}',
    b'{"tokens": [99999]}',
]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_hostile_bodies_are_refused(http: httpx.Client, stack: Stack, path: str) -> None:
    for body in HOSTILE:
        response = http.post(path, content=body, headers={"Content-Type": "application/json"})
        if path == "/tokenize" and response.status_code == 200:
            # what makes it hostile elsewhere is a field that this route does not know
            continue
        assert 400 <= response.status_code < 500, (body[:80], response.text[:300])
        error_of(response)
    assert stack.script.requests == []


def test_an_address_in_a_request_is_refused_and_nobody_connects_to_it(
    http: httpx.Client, stack: Stack
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        here = (f"http://127.0.0.1:{port}/a.png", f"http://localhost:{port}", f"http://me@127.1:{port}/x?y")
        for url in (
            *here,
            "file:///etc/passwd",
            "http://169.254.169.254/latest/meta-data",
            "data:image/png,x",
        ):
            text = {"type": "text", "text": "what is this?"}
            openai = (
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "video_url", "video_url": url},
            )
            parts = (*openai, {"type": "input_audio", "input_audio": {"data": url}})
            parts += ({"type": "file", "file": {"file_data": url}},)
            asked = [(CHAT, {"messages": [{"role": "user", "content": [text, part]}]}) for part in parts]
            image = {"type": "image", "source": {"type": "url", "url": url}}
            messages = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 5}
            asked += [("/v1/messages", messages), ("/v1/messages/count_tokens", messages)]
            for part in (
                {"type": "input_image", "image_url": url},
                {"type": "input_file", "file_url": url},
            ):
                asked.append(("/v1/responses", {"input": [{"role": "user", "content": [part]}]}))
            for path, body in asked:
                response = http.post(path, json={"model": "tiny", **body})
                assert response.status_code == 400, (path, body, response.text)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert stack.script.requests == []


def test_body_must_be_json_by_its_type(http: httpx.Client) -> None:
    body = json.dumps({"messages": HELLO}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = http.post(CHAT, content=body, headers={"Content-Type": kind})
        assert response.status_code == 400
        error_of(response)


def test_a_packed_body_is_refused_with_its_encoding(http: httpx.Client, stack: Stack) -> None:
    stack.say("the fox")
    body = json.dumps({"messages": HELLO}).encode()
    for path in (CHAT, "/tokenize", "/v1/messages"):
        response = http.post(path, content=gzip.compress(body), headers=JSON | {"Content-Encoding": "gzip"})
        assert response.status_code == 400
        assert "'Content-Encoding: gzip'" in response.json()["error"]["message"]
    assert stack.script.requests == []
    assert http.post(CHAT, content=body, headers=JSON | {"Content-Encoding": "identity"}).status_code == 200


def test_a_byte_order_mark_before_a_body_is_no_part_of_it(http: httpx.Client, stack: Stack) -> None:
    # as some editors and shells write their files
    stack.say("the fox")
    body = codecs.BOM_UTF8 + json.dumps({"messages": HELLO}).encode()
    response = http.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 200, response.text


def test_large_bodies_are_refused_before_parsing(http: httpx.Client, stack: Stack) -> None:
    address = httpx.URL(stack.url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as connection:
        connection.sendall(f"{head}Content-Length: 999999999999\r\n\r\n".encode())
        assert b"413" in connection.recv(100)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"40000\r\n" + b" " * 0x40000 + b"\r\n"
        # one mebibyte is the least limit; the server answers after it and stops reading
        for _ in range(5):
            connection.sendall(chunk)
        assert b"413" in connection.recv(100)


def test_unknown_fields_are_ignored(http: httpx.Client, stack: Stack) -> None:
    stack.say("the")
    body = {"messages": HELLO, "made_up": {"a": [1]}, "user": "u", "tools": []}
    assert http.post(CHAT, json=body).status_code == 200


def test_text_parts_are_joined_and_template_arguments_used(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the")
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    body = {"messages": [{"role": "user", "content": parts}], "chat_template_kwargs": {"suffix": "!!"}}
    assert http.post(CHAT, json=body).status_code == 200
    expected = "<|bos|><|user|>the fox<|end|>!!<|assistant|>"
    prompt = stack.tokenizer.encode(expected, add_special_tokens=False).ids
    assert list(script.requests[0].prompt_token_ids) == prompt


def test_engine_extras_reach_the_worker(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the")
    extras = {
        "top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [9], "logit_bias": {"11": -5}, "top_p": 0.5, "temperature": 0, "max_tokens": 8,
        "session_id": "un café", "cache_salt": "du sel", "priority": -7,
    }  # fmt: skip
    assert http.post(CHAT, json={"messages": HELLO, **extras}).status_code == 200
    sampling = script.requests[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.25, 1.5)
    assert (sampling.min_tokens, sampling.ignore_eos, list(sampling.stop_token_ids)) == (2, True, [9])
    assert (dict(sampling.logit_bias), sampling.top_p) == ({11: -5}, 0.5)
    assert (sampling.temperature, sampling.max_tokens) == (0, 8)
    assert (script.requests[0].session_id, script.requests[0].cache_salt) == ("un café", "du sel")
    assert script.requests[0].priority == -7


def test_numbers_may_be_texts_and_whole_ones_have_a_point(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the fox jumps over the lazy dog")
    fields = {
        "max_tokens": "5",
        "top_k": 3.0,
        "temperature": "0.5",
        "seed": "7",
        "n": 1.0,
        "stop_token_ids": ["9"],
    }
    reply = http.post("/v1/completions", json={"prompt": ["1", "2"], **fields})
    assert len(reply.json()["choices"]) == 2
    sampling = script.requests[0].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.temperature) == (5, 3, 0.5)
    assert (sampling.seed, list(sampling.stop_token_ids)) == (7, [9])


def test_a_prompt_that_fits_may_be_written_with_escapes(model_dir: Path) -> None:
    async def limit() -> BodyLimit:
        worker = Mock()
        worker.info = AsyncMock(return_value=pb.GetInfoResponse(max_model_len=131_072))
        config = GatewayConfig(model=str(model_dir), worker="unix:w")
        service = ChatService(config, worker, load_tokenizer(model_dir, None), pb.SamplingParams())
        return await service.bodies.now()

    prompt = "你好" * 131_072
    assert len(json.dumps({"prompt": prompt})) < asyncio.run(limit()).max_bytes


def test_tokenize_and_back(http: httpx.Client, stack: Stack) -> None:
    text = "the fox 🦊"
    tokens = http.post("/tokenize", json={"prompt": text}).json()
    assert tokens["tokens"] == stack.tokenizer.encode(text).ids
    assert tokens["count"] == len(tokens["tokens"])
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": HELLO}).json()
    assert chat["tokens"][0] == 0


def test_tokenize_takes_a_prompt_or_messages(http: httpx.Client) -> None:
    for body in ({}, {"prompt": "a", "messages": HELLO}):
        assert error_of(http.post("/tokenize", json=body))["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2, not 3"),
        ({"temperature": "hot"}, ', not "hot"'),
        ({"seed": -(10**30)}, f", not -{10**30}"),
        (
            {"carrel": {"budget": 2.5}},
            "carrel.budget: give a share of the prompt in (0, 1], or a whole number",
        ),
        ({"carrel": {"budget": "abc"}}, 'from 2 up, not "abc"'),
        ({"carrel": {"budget": [1]}}, "from 2 up"),
        ({"carrel": {"bugdet": 1}}, "carrel.bugdet: there is no such field"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "A part of type 'image_url'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "A part of type 'text' has no text.",
        ),
        ({"messages": [{"role": "user"}]}, "A message of the role 'user' has no content"),
    ],
    ids=str,
)
def test_an_error_tells_what_was_given(http: httpx.Client, fields: dict[str, Any], told: str) -> None:
    assert told in error_of(http.post(CHAT, json={"messages": HELLO, **fields}))["message"]


def test_an_error_tells_no_long_value(http: httpx.Client) -> None:
    for value in ("x" * 10**6, "x" * 1000, [{"text": "x"}]):
        error = error_of(http.post(CHAT, json={"messages": HELLO, "temperature": value}))
        assert error["param"] == "temperature"
        assert "x" not in error["message"]
    many = {name: "x" for name in ("temperature", "top_p", "min_p", "seed", "n", "top_k", "presence_penalty")}
    assert len(error_of(http.post(CHAT, json={"messages": HELLO, **many}))["message"]) < 2100


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert error_of(http.get("/nothing"))["code"] == 404
    assert "POST" in error_of(http.get(CHAT))["message"]
    refused = http.put("/v1/sessions/x")
    assert "does not take PUT: use DELETE, GET, HEAD, POST." in error_of(refused)["message"]
    assert refused.headers["allow"] == "DELETE, GET, HEAD, POST"
    # a base URL without /v1
    assert (
        "did you mean /v1/chat/completions?" in error_of(http.post("/chat/completions", json={}))["message"]
    )
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    assert error_of(http.post(CHAT + "/", json={}))["code"] == 404


def test_health_ready_version_metrics(http: httpx.Client, stack: Stack) -> None:
    for path in ("/health", "/ready"):
        assert http.get(path).status_code == http.head(path).status_code == 200
    assert http.get("/version").json()["version"]
    stack.say("the fox")
    http.post(CHAT, json={"messages": HELLO})
    text = http.get("/metrics").text
    assert 'carrel_requests_total{endpoint="chat",model_name="tiny",outcome="stop"}' in text
    assert 'carrel_time_to_first_token_seconds_count{model_name="tiny"}' in text
    assert 'carrel_inter_token_latency_seconds_count{model_name="tiny"}' in text
    assert 'carrel_e2e_request_latency_seconds_count{model_name="tiny"}' in text
    assert 'carrel_gateway_requests_running{model_name="tiny"} 0.0' in text
    assert 'carrel_worker_fetched_bytes_total{model_name="tiny"} 11.0' in text
    assert 'carrel_worker_cached_tokens_total{model_name="tiny"} 5.0' in text
    for name, value in (
        ("slot_used_tokens", 64.5),
        ("slot_capacity_tokens", 4096.0),
        ("prefilling", 1.0),
        ("prefilling_tokens_left", 90.0),
    ):
        assert f"# TYPE carrel_worker_{name} gauge" in text
        assert f'carrel_worker_{name}{{model_name="tiny"}} {value}' in text
    assert 'carrel_worker_slot_usage_ratio{model_name="tiny"} 0.015747' in text
    for bound, count in ((0.5, 2.0), (1.0, 3.0), ("+Inf", 4.0)):
        assert f'carrel_worker_offload_seconds_bucket{{le="{bound}",model_name="tiny"}} {count}' in text
    assert 'carrel_worker_offload_seconds_sum{model_name="tiny"} 3.5' in text
    of_index = 'cause="index",model_name="tiny"'
    assert f"carrel_worker_decode_stall_seconds_count{{{of_index}}} 3.0" in text
    assert 'carrel_worker_fallbacks_total{kind="recompute",model_name="tiny"} 2.0' in text
    # A worker that has no such times yet still names them.
    assert "# TYPE carrel_worker_gather_seconds histogram" in text
    assert 'carrel_build_info{commit="' in text
    assert 'carrel_draining{model_name="tiny"} 0.0' in text
    assert 'carrel_store_arena_bytes{model_name="tiny"} 1.048576e+06' in text
    assert 'carrel_store_evicted_bytes_total{model_name="tiny"} 512.0' in text
    of_begin = 'method="Begin",model_name="tiny"'
    assert f'carrel_store_calls_total{{code="OK",{of_begin}}} 3.0' in text
    for bound, count in ((0.5, 2.0), ("+Inf", 3.0)):
        assert f'carrel_store_call_seconds_bucket{{le="{bound}",{of_begin}}} {count}' in text
    assert f"carrel_store_call_seconds_sum{{{of_begin}}} 0.75" in text
    stack.script.store_reachable = False
    assert http.get("/health").status_code == 200
    assert error_of(http.get("/ready"))["code"] == "store_unavailable"
    assert "carrel_store_" not in http.get("/metrics").text


def test_what_is_refused_is_counted_by_reason(locked_stack: Stack) -> None:
    def rejected() -> dict[str, float]:
        text = locked_stack.service.metrics.render(None).decode()
        return {
            reason: float(count)
            for reason, count in re.findall(
                r'^carrel_requests_rejected_total{.*reason="(\w+)"} (.+)$', text, re.M
            )
        }

    def ask(key: str = "right-key", path: str = CHAT, **fields: object) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"messages": HELLO, **fields}
        httpx.post(f"{locked_stack.url}{path}", json=body, headers=headers, timeout=PATIENCE)

    before = rejected()
    locked_stack.say("the fox")
    ask()
    ask("wrong-key")
    ask(model="another")
    admission = locked_stack.service.admission
    admission.is_draining = True
    try:
        ask()
        text = locked_stack.service.metrics.render(None).decode()
    finally:
        admission.is_draining = False
    assert 'carrel_draining{model_name="tiny"} 1.0' in text
    # before the service has it: by its schema, by what it asks for, and over gRPC
    ask(temperature=9)
    ask(logit_bias={"x": 1})
    ask(tools=[], tool_choice="required")
    ask(path="/v1/completions", prompt="the", best_of=2)
    ask(path="/v1/messages", max_tokens=0)
    ask(path="/v1/responses", input="hi", truncation="auto")
    with grpc.insecure_channel(locked_stack.grpc_target) as channel:
        call = chat_pb2_grpc.ChatStub(channel).Complete(
            chat_pb2.ChatRequest(temperature=9), metadata=(("authorization", "Bearer right-key"),)
        )
        with pytest.raises(grpc.RpcError):
            list(call)
    # what fails half-way was not refused
    locked_stack.say("the fox", fail_at=1)
    ask()
    gained = {
        reason: count - before[reason] for reason, count in rejected().items() if count - before[reason]
    }
    assert gained == {"unauthorized": 1, "unknown_model": 1, "shutting_down": 1, "invalid_request": 7}


def test_an_answers_phases_are_observed_and_a_failed_ones_as_far_as_they_ended(
    http: httpx.Client, stack: Stack
) -> None:
    def counts() -> list[int]:
        text = http.get("/metrics").text
        names = [f"carrel_request_{phase}_time_seconds_count" for phase in ("queue", "prefill", "decode")]
        return [int(float(text.split(f'{name}{{model_name="tiny"}} ')[1].split()[0])) for name in names]

    queue, prefill, decode = counts()
    stack.say("the fox")
    http.post(CHAT, json={"messages": HELLO})
    assert counts() == [queue + 1, prefill + 1, decode + 1]
    stack.say("the fox", fail_at=1)
    http.post(CHAT, json={"messages": HELLO})
    assert counts() == [queue + 2, prefill + 2, decode + 1]


def test_a_worker_that_takes_no_request_is_told_soon_and_asked_again(
    http: httpx.Client, stack: Stack
) -> None:
    script = stack.say("the fox", hangs=True)
    # the second asks first what the worker is, as another may have come
    for _ in range(2):
        reply = http.post(CHAT, json={"messages": HELLO})
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) > 0
        assert error_of(reply)["code"] == "worker_unavailable"
        assert "does not answer" in error_of(reply)["message"]
    assert len(script.requests) == 1
    script.hangs = False
    assert http.post(CHAT, json={"messages": HELLO}).status_code == 200


def test_a_worker_that_is_busy_is_waited_for(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the fox", is_late=True)
    with ThreadPoolExecutor(1) as thread:
        reply = thread.submit(http.post, CHAT, json={"messages": HELLO})
        # longer than one that hangs is: it is asked in each look
        wait_until(lambda: script.num_asked > 2 * LOOKS or reply.done())
        script.is_late = False
        assert reply.result().status_code == 200
    assert len(script.requests) == 1


def test_a_request_that_lost_the_store_says_so_and_nothing_of_the_worker_inside(
    http: httpx.Client, stack: Stack
) -> None:
    code = (("carrel-code", "store_unavailable"),)
    stack.say("the fox", fail_at=0, fail_with=(grpc.StatusCode.UNAVAILABLE, "unix:/run/secret", code))
    reply = http.post(CHAT, json={"messages": HELLO})
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) > 0
    assert error_of(reply)["code"] == "store_unavailable"
    assert "secret" not in reply.text


def test_a_worker_of_another_version_is_refused_until_ours_comes(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the fox", version="9.9.9")
    stack.service.status.forget()
    for _ in range(2):
        error = error_of(http.post(CHAT, json={"messages": HELLO}))
        assert error["code"] == "version_mismatch"
        assert "9.9.9" in error["message"]
        assert own_edition().version in error["message"]
        assert "docs/deployment.md" in error["message"]
    reply = http.get("/ready")
    assert reply.status_code == 503
    assert "9.9.9" in error_of(reply)["message"]
    assert script.requests == []
    stack.say("the fox")
    assert http.get("/ready").status_code == 200
    assert http.post(CHAT, json={"messages": HELLO}).status_code == 200
    sent = stack.script.requests[0].edition
    assert (sent.version, sent.messages) == (own_edition().version, own_edition().messages)


def test_a_worker_that_was_replaced_by_another_version_meanwhile(http: httpx.Client, stack: Stack) -> None:
    refusal = (grpc.StatusCode.FAILED_PRECONDITION, "this worker is Carrel 9.9.9", ())
    stack.say("the fox", fail_at=0, fail_with=refusal)
    error = error_of(http.post(CHAT, json={"messages": HELLO}))
    assert (error["code"], error["message"]) == ("version_mismatch", "this worker is Carrel 9.9.9")
    stack.say("the fox", version="9.9.9")
    assert "9.9.9" in error_of(http.get("/ready"))["message"]


def test_unexpected_error_is_sanitised(
    http: httpx.Client, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(stack.service.rate_limits, "take_request", broken)
    for body in ({"messages": HELLO}, {"messages": HELLO, "stream": True}):
        response = http.post(CHAT, json=body)
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        assert "secret" not in response.text
        error_of(response)


def test_overload_is_refused_and_recovers(locked_stack: Stack) -> None:
    right, other, third = (
        {"Authorization": f"Bearer {key}"} for key in ("right-key", "other-key", "third-key")
    )
    script, body = locked_stack.say("the fox", hang_at=1), {"messages": HELLO, "stream": True}
    with httpx.Client(base_url=locked_stack.url, timeout=PATIENCE) as http:
        with http.stream("POST", CHAT, json=body, headers=right) as running:
            assert running.status_code == 200
            # a key that has its share is told so, and the others have room
            for path, asked in ((CHAT, body), ("/tokenize", {"prompt": "a"})):
                refused = http.post(path, json=asked, headers=right)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) > 0
                error = error_of(refused)
                assert (error["type"], error["code"]) == ("RateLimitError", "too_many_requests")
                assert "has 1 requests" in error["message"]
                assert "max-concurrent in --api-keys-file" in error["message"]
            with http.stream("POST", CHAT, json=body, headers=other) as second:
                assert second.status_code == 200
                response = http.post(CHAT, json=body, headers=third)
                assert response.status_code == 503
                assert int(response.headers["retry-after"]) > 0
                assert error_of(response)["code"] == "overloaded"
        wait_until(lambda: script.num_cancelled == 2)
        locked_stack.say("the fox")
        wait_until(lambda: http.post(CHAT, json={"messages": HELLO}, headers=right).status_code == 200)


def routes(stack: Stack) -> list[tuple[str, str]]:
    headers = {"Authorization": "Bearer right-key"}
    document = httpx.get(f"{stack.url}/openapi.json", headers=headers, timeout=PATIENCE).json()
    found = [(method.upper(), path) for path, item in document["paths"].items() for method in item]
    return [*found, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nothing")]


def test_every_route_needs_a_key(locked_stack: Stack) -> None:
    assert len(routes(locked_stack)) >= 12
    with httpx.Client(base_url=locked_stack.url, timeout=PATIENCE) as http:
        for method, path in routes(locked_stack):
            path = path.replace("{model_id}", "tiny")
            if path in UNGUARDED_PATHS:
                assert http.request(method, path).status_code == 200
                path = f"/{path}"
            query, above = f"{path}?api_key=right-key", f"/health/..{path}"
            for variant in (path, f"{path}/", f"/{path}", query, f"{path}/%2e", above):
                for verb in (method, "HEAD", "OPTIONS"):
                    url = httpx.URL(locked_stack.url).copy_with(raw_path=variant.encode())
                    assert http.request(verb, url).status_code == 401, (verb, variant)
        for headers in (
            {"Host": "x/v1/health?", "X-Forwarded-Prefix": "/health"},
            *(
                {"Authorization": key}
                for key in ("Bearer wrong", "right-key", "Basic right-key", "Bearer RIGHT-KEY")
            ),
        ):
            assert http.get("/v1/models", headers=headers).status_code == 401
        assert error_of(http.get("/v1/models"))["type"] == "AuthenticationError"
        assert http.get("/v1/models", headers={"Authorization": "bearer other-key"}).status_code == 200


def test_cors_is_off_by_default_and_narrow_when_on(
    http: httpx.Client, tmp_path: Path, model_dir: Path
) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options(CHAT, headers=asked).headers
    with running_stack(
        tmp_path, model_dir, allowed_origins=("https://a.example",), disable_docs=True
    ) as stack:
        # openai-js sends some of its own
        asked["Access-Control-Request-Headers"] = (
            "authorization,content-type,x-stainless-os,x-stainless-retry-count"
        )
        answer = httpx.options(stack.url + CHAT, headers=asked)
        assert answer.status_code == 200
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(stack.url + CHAT, headers={**asked, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        assert httpx.get(f"{stack.url}/docs").status_code == 404
        assert httpx.get(f"{stack.url}/openapi.json").status_code == 404


def test_space_that_the_template_puts_before_answers_is_left_out(tmp_path: Path) -> None:
    turn = "<|{{ m['role'] }}|>{{ ' ' if m['role'] == 'assistant' }}{{ m['content'] }}<|end|>"
    template = "{% for m in messages %}" + turn + "{% endfor %}<|assistant|>"
    model = write_tokenizer(
        tmp_path / "model",
        template.replace("<|assistant|>", "{{ '<|assistant|>' if add_generation_prompt }}"),
    )
    with running_stack(tmp_path, model) as stack, httpx.Client(base_url=stack.url) as client:
        for said, shown in ((" the fox", "the fox"), ("  fox", " fox"), ("fox", "fox"), (" ", ""), ("", "")):
            stack.say(said)
            body = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 50}
            reply = client.post("/v1/chat/completions", json=body).json()
            assert reply["choices"][0]["message"]["content"] == shown
        stack.say(" the fox")
        reply = client.post("/v1/completions", json={"prompt": "who?", "max_tokens": 50}).json()
        assert reply["choices"][0]["text"] == " the fox"


def test_model_without_a_template_still_completes(tmp_path: Path) -> None:
    with running_stack(tmp_path, write_tokenizer(tmp_path / "plain", None)) as stack:
        stack.say("the fox")
        with httpx.Client(base_url=stack.url, timeout=PATIENCE) as http:
            refused = http.post(CHAT, json={"messages": HELLO})
            assert refused.status_code == 400
            assert "--chat-template" in error_of(refused)["message"]
            answer = http.post("/v1/completions", json={"prompt": "the", "max_tokens": 50}).json()
            assert answer["choices"][0]["text"] == "the fox"


def test_a_request_past_its_deadline_is_given_up(tmp_path: Path, model_dir: Path) -> None:
    with running_stack(tmp_path, model_dir, request_timeout_s=0.5) as stack:
        stack.say("the fox", hang_at=1)
        late = httpx.post(f"{stack.url}/v1/completions", json={"prompt": "the", "n": 2}, timeout=PATIENCE)
        assert late.status_code == 504
        assert late.headers["x-should-retry"] == "false"
        assert "within 0.5 s" in late.json()["error"]["message"]
        # what there was of the answer
        assert [(each["text"], each["finish_reason"]) for each in late.json()["choices"]] == [
            ("the", None)
        ] * 2
        stack.say("the fox", hang_at=0)
        soon = {"prompt": "the", "timeout_seconds": 0.05}
        late = httpx.post(f"{stack.url}/v1/completions", json=soon, timeout=PATIENCE)
        assert "within 0.05 s" in error_of(late)["message"]
        assert "timeout_seconds" in error_of(late)["message"]
