"""Well-formed bodies that would be long in reading are refused before, by counts that texts do not change."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import httpx
import pytest
from gateway_stack import MAX_MODEL_LEN, Stack
from waiting import PATIENCE

from gateway.body_limits import BodyLimits
from gateway.errors import TooLarge, WorkerUnavailable
from gateway.exchange import Message, ToolCall
from gateway.heavy_work import HeavyWork
from gateway.json_limits import MAX_NESTED, MAX_TEXTS, MAX_VALUES, check_json
from gateway.rpc.messages import MAX_FIELDS
from gateway.tool_calls.checks import check_messages
from gateway.v1 import chat_pb2
from gateway.worker_status import WorkerStatus
from gpu_worker.v1 import gpu_worker_pb2 as pb

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
NESTED, TEXTS = "objects and lists", "texts, names of fields among them"
SHORT = {"role": "user", "content": "x"}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("route", "body", "what"),
    [
        (CHAT, {"messages": [{"role": "x"}] * MAX_NESTED}, NESTED),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * MAX_NESTED}]}, NESTED),
        (CHAT, {"messages": [{**SHORT, "tool_calls": [CALL] * (MAX_NESTED // 2)}]}, TEXTS),
        (CHAT, {"messages": [SHORT], "guided_json": {"a": [[]] * MAX_NESTED}}, NESTED),
        (CHAT, {"messages": [SHORT], "any name": [{}] * MAX_NESTED}, NESTED),
        (COMPLETIONS, {"prompt": "x", "stop": ["x"] * MAX_TEXTS}, TEXTS),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {str(at): 0 for at in range(MAX_TEXTS)}}, TEXTS),
        (RESPONSES, {"input": "x", "metadata": {str(at): "" for at in range(MAX_TEXTS // 2)}}, TEXTS),
        (RESPONSES, {"input": [{}] * MAX_NESTED}, NESTED),
        (MESSAGES, {"max_tokens": 4, "messages": [{}] * MAX_NESTED}, NESTED),
        (COMPLETIONS, {"prompt": [5] * (MAX_VALUES + MAX_MODEL_LEN + 1)}, "values"),
        ("/tokenize", {"messages": [{}] * MAX_NESTED}, NESTED),
        ("/detokenize", {"tokens": [5] * (MAX_VALUES + MAX_MODEL_LEN + 1)}, "values"),
        ("/v1/sessions/a", {"messages": [{}] * MAX_NESTED}, NESTED),
        (CHAT, {"messages": [{**SHORT, "tool_calls": [{**CALL, "function": {
            "name": "f", "arguments": json.dumps({"a": [[]] * MAX_NESTED})}}]}]}, NESTED),
    ],
)  # fmt: skip
def test_a_body_of_too_many_values_is_refused(
    http: httpx.Client, stack: Stack, route: str, body: dict[str, Any], what: str
) -> None:
    refused = http.post(route, json=body)
    assert refused.status_code == 413, refused.text
    told = refused.json()["error"]["message"]
    most = {NESTED: MAX_NESTED, TEXTS: MAX_TEXTS, "values": MAX_VALUES + MAX_MODEL_LEN}[what]
    assert f" {what}: at most {most} are read" in told
    assert int(told.split()[3]) > most
    assert stack.script.requests == []


def test_a_text_may_have_whatever_stands_between_values(http: httpx.Client, stack: Stack) -> None:
    script = stack.say("the")
    text = '{"[,\\' * (MAX_MODEL_LEN // 10)
    assert http.post(CHAT, json={"messages": [{"role": "user", "content": text}], "max_tokens": 2}).is_success
    assert stack.tokenizer.decode(script.requests[0].prompt_token_ids) == text
    check_json(json.dumps({"prompt": '{"[,\\' * MAX_VALUES}).encode())


def test_counts_are_those_of_the_parsed_json() -> None:
    random.seed(7)

    def some(depth: int) -> Any:
        texts = ["", '"', "\\", '\\"', "\\\\", '{"a": [1,2]}', "\\\\\\", "é🦊\n", ",[{"]
        kind = random.randrange(4 if depth else 2)
        if kind < 2:
            return random.choice([*texts, 1, None, -2.5e3, True])
        if kind == 2:
            return [some(depth - 1) for _ in range(random.randrange(5))]
        return {random.choice(texts) + str(at): some(depth - 1) for at in range(random.randrange(5))}

    def nested(value: Any) -> int:
        match value:
            case dict():
                return 1 + sum(map(nested, value.values()))
            case list():
                return 1 + sum(map(nested, value))
        return 0

    for _ in range(40):
        value = [some(5)]
        missing = MAX_NESTED - nested(value) - 1
        for is_ascii in (True, False):
            just = json.dumps([value, *[[]] * missing], ensure_ascii=is_ascii).encode()
            check_json(just)
            with pytest.raises(TooLarge, match=f"{MAX_NESTED + 1} {NESTED}"):
                check_json(b"[" + just + b"]")


def test_what_is_within_the_limits_is_served(http: httpx.Client, stack: Stack) -> None:
    stack.say("the")
    many = {"messages": [SHORT], "any name": [[]] * (MAX_NESTED - 10), "other": [""] * (MAX_TEXTS - 10)}
    assert http.post(CHAT, json=many).status_code == 200


def test_calls_of_earlier_turns_count_and_their_arguments_are_bounded_together() -> None:
    def chat(num_calls: int, arguments: str) -> list[Message]:
        return [Message("assistant", "x", (ToolCall("x", "f", arguments),) * num_calls)]

    check_messages(chat(MAX_NESTED - 1, "{}"))
    with pytest.raises(TooLarge, match="messages and calls"):
        check_messages(chat(MAX_NESTED, "{}"))
    with pytest.raises(TooLarge, match=NESTED):
        check_messages(chat(8, json.dumps({"a": [[]] * (MAX_NESTED // 8)})))
    with pytest.raises(TooLarge, match="messages"):
        check_messages([Message("user", "x")] * (MAX_NESTED + 1))


def over_grpc(stack: Stack, data: bytes) -> str:
    with grpc.insecure_channel(stack.grpc_target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream("/carrel.gateway.v1.Chat/Complete")(data, timeout=PATIENCE))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return caught.value.details()


def test_chat_grpc_refuses_as_rest(stack: Stack) -> None:
    """Each field of two bytes would be a message of hundreds."""
    chat, call = chat_pb2.ChatRequest, chat_pb2.ToolCall(name="f")
    for request in (
        chat(messages=[chat_pb2.Message()] * (MAX_FIELDS + 1)),
        chat(messages=[chat_pb2.Message(tool_calls=[call] * MAX_FIELDS)]),
        chat(stop=[""] * (MAX_FIELDS + 1)),
    ):
        assert f"fields or more: at most {MAX_FIELDS}" in over_grpc(stack, request.SerializeToString())
    calls = chat(messages=[chat_pb2.Message(tool_calls=[chat_pb2.ToolCall()] * MAX_NESTED)])
    assert "messages and calls" in over_grpc(stack, calls.SerializeToString())
    parameters = chat_pb2.Tool(name="f", parameters=json.dumps({"a": [[]] * MAX_NESTED}))
    assert NESTED in over_grpc(stack, chat(tools=[parameters]).SerializeToString())
    ids = chat(stop_token_ids=[1] * (MAX_NESTED + 1))
    assert "stop_token_ids" in over_grpc(stack, ids.SerializeToString())


def test_before_the_worker_is_known_a_long_body_waits_for_it() -> None:
    """It may be within the limits of the model that loads."""

    async def excess(worker: Mock) -> Exception:
        limits = BodyLimits(WorkerStatus(worker, Mock()), None, HeavyWork(), 2**20, 1.0)
        return (await limits.now()).excess()

    away = Mock(info=AsyncMock(side_effect=WorkerUnavailable()))
    assert isinstance(asyncio.run(excess(away)), WorkerUnavailable)
    there = Mock(info=AsyncMock(return_value=pb.GetInfoResponse(max_model_len=64)))
    assert isinstance(asyncio.run(excess(there)), TooLarge)
