"""REST, chat gRPC and the worker refuse what lies just outside of each range, and the worker takes its ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from gateway_stack import Stack
from pydantic import ValidationError
from waiting import PATIENCE

from carrel.process.request_limits import RANGES, LimitError, Range, check_request
from gateway.rest.responses.schemas import ResponsesBody
from gateway.rest.schemas import Body, ChatBody, CompletionBody
from gateway.rest.session_endpoints import SessionBody
from gateway.v1 import chat_pb2, chat_pb2_grpc
from gpu_worker.v1 import gpu_worker_pb2 as pb

# of what is in no object that a body may have
MANY: dict[str, Any] = {f"k{at}": [] for at in range(1000)}
INFO = pb.GetInfoResponse(vocab_size=100, max_model_len=64, policies=["full"])


def outside() -> Iterator[tuple[str, float]]:
    for name, limits in RANGES.items():
        for value in (
            limits.gt if limits.ge is None else limits.ge - 1,
            limits.lt if limits.le is None else limits.le + 1,
        ):
            assert value is not None
            yield name, value
    # 0 to the worker, whose numbers are float32
    yield "repetition_penalty", 1e-60


def test_a_top_p_of_0_is_the_likeliest_token_alone(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the")
    assert http.post("/v1/completions", json={"prompt": "a", "top_p": 0}).status_code == 200
    assert script.requests[0].sampling.top_p == 0


def bodies() -> Iterator[Any]:
    for name, value in outside():
        # to REST a top_k of -1 is off, and a budget of 2 a number of tokens
        if name != "budget_share" and (name, value) != ("top_k", -1):
            field = {"logit_bias": {"5": value}} if name == "logit_bias" else {name: value}
            yield pytest.param(name, field, id=f"{name}={value}")


def messages(kind: Any, *left_out: str) -> Iterator[Any]:
    for name, value in outside():
        if name in kind.DESCRIPTOR.fields_by_name and name not in left_out:
            try:
                message = kind(**{name: {5: value} if name == "logit_bias" else value})
            except ValueError:
                # its type refuses it already
                continue
            yield pytest.param(name, message, id=f"{name}={value}")


@pytest.mark.parametrize(("name", "field"), list(bodies()))
def test_rest_refuses(http: httpx.Client, stack: Stack, name: str, field: dict[str, Any]) -> None:
    refused = http.post("/v1/completions", json={"prompt": "a", **field})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].partition(".")[0] == name
    assert stack.script.requests == []


# 0 is none of `max_tokens`, and every seed of the type is taken
@pytest.mark.parametrize(("name", "message"), list(messages(chat_pb2.ChatRequest, "max_tokens", "seed")))
def test_chat_grpc_refuses(stack: Stack, name: str, message: chat_pb2.ChatRequest) -> None:
    message.messages.add(role="user", content="hello")
    with grpc.insecure_channel(stack.grpc_target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(chat_pb2_grpc.ChatStub(channel).Complete(message, timeout=PATIENCE))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["carrel-param"] == name


@pytest.mark.parametrize(("name", "message"), list(messages(pb.SamplingParams, "seed")))
def test_the_worker_refuses(name: str, message: pb.SamplingParams) -> None:
    with pytest.raises(LimitError) as caught:
        check_request(pb.GenerateRequest(sampling=message), INFO)
    assert caught.value.param == name


def test_the_ends_of_a_range_are_taken() -> None:
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        limits = RANGES.get(field.name, Range())
        for end in (limits.ge, limits.le):
            if end is not None and field.name not in ("seed", "logit_bias"):
                check_request(pb.GenerateRequest(sampling=pb.SamplingParams(**{field.name: end})), INFO)


def test_a_nan_is_in_no_range() -> None:
    assert not any(float("nan") in limits for limits in RANGES.values())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [{}] * 1000}),
        (CompletionBody, {"prompt": [1] * 1000 + [None]}),
        (CompletionBody, {"prompt": [[None] * 1000] * 10}),
        (CompletionBody, {"prompt": "x", "stop": [1] * 1000, "stop_token_ids": ["x"] * 1000}),
        (ChatBody, {"messages": [1] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
        (ChatBody, {"messages": [], "chat_template_kwargs": MANY}),
        (ChatBody, {"messages": [], "logit_bias": {"5": 1.0, **MANY}}),
        (ChatBody, {"messages": [], "carrel": {"options": MANY}}),
        (ResponsesBody, {"input": "x", "metadata": MANY}),
        (SessionBody, {"chat_template_kwargs": MANY}),
    ],
)
def test_a_long_list_of_what_is_wrong_is_one_error(kind: type[Body], body: dict[str, Any]) -> None:
    """Not one for each item: a megabyte of them would hold up everybody for seconds."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(json.dumps(body))
    assert refused.value.error_count() <= 8


def test_many_unknown_names_are_counted_and_not_told(http: httpx.Client) -> None:
    carrel = {f"name_{number}": 1 for number in range(2000)}
    refused = http.post("/v1/completions", json={"prompt": "a", "carrel": carrel})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("carrel: 2000 names")
    assert "name_1" not in refused.text
