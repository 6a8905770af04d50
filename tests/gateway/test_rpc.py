from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from gateway_stack import MAX_MODEL_LEN, Stack, running_stack
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from waiting import PATIENCE, wait_until

from gateway.errors import ServiceError, WorkerUnavailable
from gateway.rpc import server
from gateway.rpc.server import MAX_WATCHES
from gateway.v1 import chat_pb2 as pb
from gateway.v1 import chat_pb2_grpc

MESSAGES = [pb.Message(role="user", content="hello")]


@pytest.fixture
def channel(stack: Stack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stack.grpc_target) as channel:
        yield channel


@pytest.fixture
def chat(channel: grpc.Channel) -> chat_pb2_grpc.ChatStub:
    return chat_pb2_grpc.ChatStub(channel)


def test_same_answer_as_rest(chat: chat_pb2_grpc.ChatStub, stack: Stack) -> None:
    script = stack.say("the fox 🦊 你好 xw tail")
    options = {"recent_ratio": "0.25", "num_sink": "4"}
    carrel = pb.CarrelOptions(policy="pqcache", budget_tokens=64, options=options)
    request = pb.ChatRequest(
        request_id="my-id", messages=MESSAGES, seed=4, top_k=3, stop=[" xw"], carrel=carrel, priority=9
    )
    events = list(chat.Complete(request, timeout=PATIENCE))
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "seed": 4,
        "top_k": 3,
        "stop": " xw",
        "priority": 9,
        "carrel": {"policy": "pqcache", "budget": 64, "options": {"recent_ratio": 0.25, "num_sink": 4}},
    }
    rest = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    assert {event.request_id for event in events} == {"my-id"}
    assert "".join(event.delta.content for event in events) == rest["choices"][0]["message"]["content"]
    complete = events[-1].complete
    assert complete.finish_reason == rest["choices"][0]["finish_reason"] == "stop"
    for name in ("prompt_tokens", "total_tokens"):
        assert getattr(complete.usage, name) == rest["usage"][name]
    assert complete.usage.carrel.policy == rest["usage"]["carrel"]["policy"] == "pqcache"
    assert complete.usage.carrel.budget_tokens == 64
    over_grpc, over_rest = script.requests
    assert over_grpc.priority == 9
    assert over_grpc.policy_options == options
    over_grpc.request_id = over_rest.request_id = ""
    assert over_grpc == over_rest


def test_choices_and_logprobs_as_over_rest(chat: chat_pb2_grpc.ChatStub, stack: Stack) -> None:
    script = stack.say("the 你好")
    shared = {"n": 2, "logit_bias": {11: -5.0}, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9]}
    request = pb.ChatRequest(
        messages=MESSAGES, logprobs=2, truncate_prompt_tokens=5, add_special_tokens=True, **shared
    )
    events = list(chat.Complete(request, timeout=PATIENCE))
    body = {
        "messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2,
        "truncate_prompt_tokens": 5, "add_special_tokens": True, **shared,
    }  # fmt: skip
    rest = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    for index, choice in enumerate(rest["choices"]):
        deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == index]
        assert "".join(delta.content for delta in deltas) == choice["message"]["content"] == "the 你好"
        tokens = [token for delta in deltas for token in delta.logprobs]
        assert [list(token.bytes) for token in tokens] == [
            each["bytes"] for each in choice["logprobs"]["content"]
        ]
        assert all(len(token.top) == 2 and token.logprob == -0.5 for token in tokens)
    assert list(events[-1].complete.finish_reasons) == ["stop", "stop"]
    assert events[-1].complete.usage.total_tokens == rest["usage"]["total_tokens"]
    samplings = {request.sampling.SerializeToString(deterministic=True) for request in script.requests}
    assert (len(script.requests), len(samplings)) == (4, 1)
    assert {len(request.prompt_token_ids) for request in script.requests} == {5}


def test_progress_comes_first_if_asked(chat: chat_pb2_grpc.ChatStub, stack: Stack) -> None:
    stack.say("the fox", progress=[(0, 3), (1, 3)])
    request = pb.ChatRequest(messages=MESSAGES, include_progress=True)
    first, *others = list(chat.Complete(request, timeout=PATIENCE))
    num_prompt = others[-1].complete.usage.prompt_tokens
    assert first.progress == pb.Progress(prompt_tokens=num_prompt, computed_tokens=0, cached_tokens=3)
    request.include_progress = False
    events = list(chat.Complete(request, timeout=PATIENCE))
    assert events[0].delta.content
    assert not any(event.HasField("progress") for event in events)


def test_models_and_health(chat: chat_pb2_grpc.ChatStub, channel: grpc.Channel) -> None:
    models = chat.ListModels(pb.ListModelsRequest(), timeout=PATIENCE).models
    assert [(model.id, model.max_model_len) for model in models] == [("tiny", MAX_MODEL_LEN)]
    check = health_pb2_grpc.HealthStub(channel).Check
    for service in ("", "carrel.gateway.v1.Chat"):
        asked = health_pb2.HealthCheckRequest(service=service)
        # it may still be known that another test's worker hung
        wait_until(
            lambda asked=asked: (
                check(asked, timeout=PATIENCE).status == health_pb2.HealthCheckResponse.SERVING
            )
        )


def test_health_is_looked_at_again_after_an_unexpected_error(
    channel: grpc.Channel, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [ZeroDivisionError("inner")]

    async def why_not_ready() -> ServiceError:
        if errors:
            raise errors.pop()
        return WorkerUnavailable("It loads.")

    check = health_pb2_grpc.HealthStub(channel).Check
    with monkeypatch.context() as patch:
        patch.setattr(stack.service.status, "why_not_ready", why_not_ready)
        patch.setattr(server, "HEALTH_INTERVAL_S", 0.01)
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        # it may still be known that another test's worker hung
        wait_until(
            lambda: (
                not errors and check(health_pb2.HealthCheckRequest(), timeout=PATIENCE).status == not_serving
            )
        )


def test_reflection_lists_chat(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    reply = next(stub.ServerReflectionInfo(iter([asked]), timeout=PATIENCE))
    names = {service.name for service in reply.list_services_response.service}
    assert "carrel.gateway.v1.Chat" in names


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (pb.ChatRequest(), grpc.StatusCode.INVALID_ARGUMENT, "messages"),
        (pb.ChatRequest(messages=MESSAGES, model="gpt-4"), grpc.StatusCode.NOT_FOUND, "model"),
        (pb.ChatRequest(messages=MESSAGES, max_tokens=500), grpc.StatusCode.INVALID_ARGUMENT, "messages"),
        (
            pb.ChatRequest(messages=[pb.Message(role="pirate", content="x")]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "messages",
        ),
        (
            pb.ChatRequest(messages=[pb.Message(role="user", content="\x00")]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "messages",
        ),
        (
            pb.ChatRequest(messages=MESSAGES, session_id="x" * 129),
            grpc.StatusCode.INVALID_ARGUMENT,
            "session_id",
        ),
        (
            pb.ChatRequest(messages=MESSAGES, cache_salt="x" * 257),
            grpc.StatusCode.INVALID_ARGUMENT,
            "cache_salt",
        ),
        *[
            (pb.ChatRequest(messages=MESSAGES, carrel=carrel), grpc.StatusCode.INVALID_ARGUMENT, param)
            for carrel, param in [
                (pb.CarrelOptions(policy="magic"), "carrel.policy"),
                (pb.CarrelOptions(budget_share=1.5), "carrel.budget"),
                (pb.CarrelOptions(budget_share=float("nan")), "carrel.budget"),
                (pb.CarrelOptions(budget_tokens=1), "carrel.budget"),
            ]
        ],
    ],
)
def test_bad_requests(
    chat: chat_pb2_grpc.ChatStub, stack: Stack, request_: pb.ChatRequest, code: grpc.StatusCode, param: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(chat.Complete(request_, timeout=PATIENCE))
    assert caught.value.code() == code
    assert dict(caught.value.trailing_metadata())["carrel-param"] == param
    assert stack.script.requests == []


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL],
)
def test_worker_errors_before_and_within_the_stream(
    chat: chat_pb2_grpc.ChatStub, stack: Stack, code: grpc.StatusCode
) -> None:
    stack.say("the fox", fail_at=0, fail_with=(code, "details", ()))
    with pytest.raises(grpc.RpcError) as caught:
        list(chat.Complete(pb.ChatRequest(messages=MESSAGES), timeout=PATIENCE))
    assert caught.value.code() == code
    stack.say("the fox", fail_at=2, fail_with=(code, "details", ()))
    events = list(chat.Complete(pb.ChatRequest(messages=MESSAGES), timeout=PATIENCE))
    assert events[0].delta.content
    assert events[-1].error.code == (500 if code == grpc.StatusCode.INTERNAL else 503)


@pytest.mark.parametrize("method", ["Complete", "ListModels"])
def test_what_cannot_be_decoded_is_the_clients_error(channel: grpc.Channel, method: str) -> None:
    call = channel.unary_stream(f"/carrel.gateway.v1.Chat/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"\xff\xff\xff", timeout=PATIENCE))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be decoded" in caught.value.details()


def test_a_field_of_another_chat_proto_is_refused_and_not_dropped(
    channel: grpc.Channel, stack: Stack
) -> None:
    # a number under 1000, as one byte behind the tag of two
    unknown = b"\xc0\x3e\x05"
    message = pb.Message.FromString(MESSAGES[0].SerializeToString() + unknown)
    inner = pb.ChatRequest(messages=[message]).SerializeToString()
    call = channel.unary_stream("/carrel.gateway.v1.Chat/Complete")
    for data, kind in (
        (pb.ChatRequest(messages=MESSAGES).SerializeToString() + unknown, "ChatRequest"),
        (inner, "Message"),
    ):
        with pytest.raises(grpc.RpcError, match=f"{kind} has no field 1000") as caught:
            list(call(data, timeout=PATIENCE))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert stack.script.requests == []


def test_cancelled_call_frees_the_worker(chat: chat_pb2_grpc.ChatStub, stack: Stack) -> None:
    script = stack.say("the quick fox", hang_at=2)
    call = chat.Complete(pb.ChatRequest(messages=MESSAGES), timeout=PATIENCE)
    assert next(call).delta.content
    call.cancel()
    wait_until(lambda: script.num_cancelled == 1 and not stack.service.admission.num_running)


def test_a_key_that_has_its_share_is_told_so(locked_stack: Stack) -> None:
    locked_stack.say("the quick fox", hang_at=2)
    metadata = (("authorization", "Bearer right-key"),)
    with grpc.insecure_channel(locked_stack.grpc_target) as channel:
        chat = chat_pb2_grpc.ChatStub(channel)
        call = chat.Complete(pb.ChatRequest(messages=MESSAGES), timeout=PATIENCE, metadata=metadata)
        assert next(call).delta.content
        with pytest.raises(grpc.RpcError) as caught:
            list(chat.Complete(pb.ChatRequest(messages=MESSAGES), timeout=PATIENCE, metadata=metadata))
        call.cancel()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(caught.value.trailing_metadata())
    assert (trailing["carrel-code"], trailing["carrel-retry-after"]) == ("too_many_requests", "1")
    wait_until(lambda: not locked_stack.service.admission.num_running)


def test_unexpected_error_is_sanitised(
    chat: chat_pb2_grpc.ChatStub, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(stack.service.rate_limits, "take_request", broken)
    with pytest.raises(grpc.RpcError) as caught:
        list(chat.Complete(pb.ChatRequest(messages=MESSAGES), timeout=PATIENCE))
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()


def test_every_method_but_health_needs_a_key(locked_stack: Stack) -> None:
    locked_stack.say("the")
    with grpc.insecure_channel(locked_stack.grpc_target) as channel:
        chat = chat_pb2_grpc.ChatStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        calls = (
            lambda metadata: list(
                chat.Complete(pb.ChatRequest(messages=MESSAGES), timeout=PATIENCE, metadata=metadata)
            ),
            lambda metadata: chat.ListModels(pb.ListModelsRequest(), timeout=PATIENCE, metadata=metadata),
            lambda metadata: next(
                reflection.ServerReflectionInfo(iter([asked]), timeout=PATIENCE, metadata=metadata)
            ),
        )
        for call in calls:
            for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "right-key"),)):
                with pytest.raises(grpc.RpcError) as caught:
                    call(metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert call((("authorization", "Bearer right-key"),))
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE).status


def test_streams_of_health_are_bounded(channel: grpc.Channel) -> None:
    health, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
    watches = [health.Watch(asked, timeout=PATIENCE) for _ in range(MAX_WATCHES)]
    assert all(next(watch).status for watch in watches)
    with pytest.raises(grpc.RpcError) as caught:
        next(health.Watch(asked, timeout=PATIENCE))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for watch in watches:
        watch.cancel()
    assert health.Check(asked, timeout=PATIENCE).status


# a client whose library takes little ahead of its reader
DEAF = (("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0))


def deaf_call(channel: grpc.Channel) -> grpc.Call:
    """Its client reads one event, and then nothing for now."""
    call = chat_pb2_grpc.ChatStub(channel).Complete(pb.ChatRequest(messages=MESSAGES), timeout=PATIENCE)
    assert next(call).delta.content
    return call


def test_an_answer_that_is_finished_holds_no_place_until_it_is_read(stack: Stack) -> None:
    stack.say("the fox " * 80)
    with grpc.insecure_channel(stack.grpc_target, options=DEAF) as channel:
        call = deaf_call(channel)
        wait_until(lambda: not stack.service.admission.num_running)
        assert list(call)[-1].complete.finish_reason == "stop"


def test_a_client_that_does_not_read_is_ended(tmp_path: Path, model_dir: Path) -> None:
    with running_stack(tmp_path, model_dir, write_timeout_s=0.3) as stack:
        script = stack.say("the fox " * 80, hang_at=100)
        with grpc.insecure_channel(stack.grpc_target, options=DEAF) as channel:
            call = deaf_call(channel)
            wait_until(lambda: script.num_cancelled == 1 and not stack.service.admission.num_running)
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "not read in time" in caught.value.details()


def test_the_trace_of_a_request_goes_on_to_the_worker_by_either_protocol(
    chat: chat_pb2_grpc.ChatStub, http: httpx.Client, stack: Stack
) -> None:
    script = stack.say("the fox")
    valid = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"messages": [{"role": "user", "content": "hello"}]}
    for sent in (valid, "00-nonsense-01", None):
        headers = {} if sent is None else {"traceparent": sent}
        http.post("/v1/chat/completions", json=body, headers=headers)
        list(
            chat.Complete(
                pb.ChatRequest(messages=MESSAGES), timeout=PATIENCE, metadata=tuple(headers.items())
            )
        )
    assert script.traceparents == [valid, valid, None, None, None, None]
