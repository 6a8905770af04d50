"""Answers as a model may write them, over every API: none ends in 500, and the next turn takes each back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from fake_worker import Script
from gateway_stack import Stack, running_stack, write_tokenizer
from waiting import PATIENCE

from gateway.v1 import chat_pb2, chat_pb2_grpc

ASKED = {"role": "user", "content": "hi"}
# writes an argument as it is, and as JSON
OWN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}<|assistant|>"
)
# arguments that a model may write, and what a client gets where it gets an object
ARGUMENTS = {
    '{"city": "\\ud83d"}': {"city": "\ufffd"},
    '{"\\udc00": "\\ud83d\\ud83d\\ude00 \\\\ud83d"}': {"\ufffd": "\ufffd\U0001f600 \\ud83d"},
    '{"city": "\\u0000"}': {"city": "\ufffd"},
    '{"city": [NaN, Infinity, -Infinity, 1e999, 1]}': {"city": [None, None, None, None, 1]},
    '{"city": ' + "1" * 5000 + "}": None,
    '{"city": ' + "[" * 300 + "]" * 300 + "}": None,
    '{"city": ' + "[" * 150 + "]" * 150 + "}": None,
    '{"city": "a\nb"}': None,
    '{"city": "Rome",}': None,
    "{'city': 'Rome'}": None,
    '{"city": "Ro': None,
    "[1]": None,
    "7": None,
    '"Rome"': None,
}
every_argument = pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))


@pytest.fixture(scope="module", params=["text", "template"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Calls are written as text, or by the template."""
    folder = tmp_path_factory.mktemp(request.param)
    template = {} if request.param == "text" else {"template": OWN}
    with running_stack(folder, write_tokenizer(folder / "model", **template), 16384) as stack:
        yield stack


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    stack.script = Script()
    with httpx.Client(base_url=stack.url, timeout=PATIENCE) as client:
        yield client


def post(http: httpx.Client, path: str, body: object) -> dict[str, Any]:
    """As strict JSON, in ASCII, as many clients write it."""
    raw = json.dumps(body, allow_nan=False)
    answer = http.post(path, content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(path, json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def written(arguments: str) -> str:
    """A call that is cut off has nothing behind it."""
    call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}'
    return call if arguments.endswith("Ro") else f"{call}}}\n</tool_call>"


def told(arguments: str) -> dict[str, Any]:
    known = ARGUMENTS[arguments]
    return (
        {"INVALID_JSON": json.loads(arguments) if arguments[0] == '"' else arguments}
        if known is None
        else known
    )


@every_argument
def test_chats_and_what_reads_their_messages(http: httpx.Client, stack: Stack, arguments: str) -> None:
    stack.say(written(arguments))
    tool = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": [ASKED], "tools": [tool], "max_tokens": 7000}
    message = post(http, "/v1/chat/completions", body)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    deltas = [chunk["choices"][0]["delta"] for chunk in events(http, "/v1/chat/completions", body)]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
    stack.say("x")
    messages = [ASKED, message, {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
    post(http, "/v1/chat/completions", {**body, "messages": messages})
    prompt = stack.tokenizer.decode(list(stack.script.requests[0].prompt_token_ids))
    assert json.dumps(told(arguments), ensure_ascii=False) in prompt
    assert post(http, "/tokenize", {"messages": messages})["count"] > 0
    assert post(http, "/v1/sessions/one", {"messages": messages})["tokens"] > 0

    called = chat_pb2.ToolCall(id=call["id"], name="weather", arguments=call["function"]["arguments"])
    history = [
        chat_pb2.Message(**ASKED),
        chat_pb2.Message(role="assistant", tool_calls=[called]),
        chat_pb2.Message(role="tool", content="7", tool_call_id=call["id"]),
    ]
    request = chat_pb2.ChatRequest(messages=history, tools=[chat_pb2.Tool(name="weather")])
    with grpc.insecure_channel(stack.grpc_target) as channel:
        assert list(chat_pb2_grpc.ChatStub(channel).Complete(request, timeout=PATIENCE))
    stack.say(written(arguments))


@every_argument
def test_responses(http: httpx.Client, stack: Stack, arguments: str) -> None:
    stack.say(written(arguments))
    body = {"input": "hi", "tools": [{"type": "function", "name": "weather"}], "max_output_tokens": 7000}
    first = post(http, "/v1/responses", body)
    (call,) = first["output"]
    answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    asked = [{"role": "user", "content": "hi"}, call, answer]
    prompts = []
    for fields in ({"input": [answer], "previous_response_id": first["id"]}, {"input": asked}):
        stack.say("x")
        post(http, "/v1/responses", {**body, **fields})
        prompts.append(stack.script.requests[0].prompt_token_ids)
    assert prompts[0] == prompts[1]
    assert json.dumps(told(arguments), ensure_ascii=False) in stack.tokenizer.decode(list(prompts[0]))


@every_argument
def test_messages(http: httpx.Client, stack: Stack, arguments: str) -> None:
    stack.say(written(arguments))
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    body = {"messages": [ASKED], "tools": [tool], "max_tokens": 7000}
    (call,) = post(http, "/v1/messages", body)["content"]
    assert call["input"] == told(arguments)
    deltas = [event["delta"] for event in events(http, "/v1/messages", body) if "delta" in event]
    streamed = "".join(delta.get("partial_json", "") for delta in deltas)
    taken = [call["input"]]
    if ARGUMENTS[arguments] is not None and "Infinity" not in arguments:
        # what a client of another language makes of it, which writes it back as it was
        taken.append(json.loads(streamed))
    for value in taken:
        answer = {"type": "tool_result", "tool_use_id": call["id"], "content": "7"}
        messages = [
            ASKED,
            {"role": "assistant", "content": [{**call, "input": value}]},
            {"role": "user", "content": [answer]},
        ]
        stack.say("x")
        post(http, "/v1/messages", {**body, "messages": messages})
        prompt = stack.tokenizer.decode(list(stack.script.requests[0].prompt_token_ids))
        assert json.dumps(told(arguments), ensure_ascii=False) in prompt
        assert post(http, "/v1/messages/count_tokens", {"messages": messages})["input_tokens"] > 0


def test_schemas_of_tools_over_grpc(stack: Stack) -> None:
    stack.say("x")
    schema = '{"type": "object", "description": "\\ud83d"}'
    request = chat_pb2.ChatRequest(
        messages=[chat_pb2.Message(**ASKED)], tools=[chat_pb2.Tool(name="weather", parameters=schema)]
    )
    with grpc.insecure_channel(stack.grpc_target) as channel:
        assert list(chat_pb2_grpc.ChatStub(channel).Complete(request, timeout=PATIENCE))
    assert "\ufffd" in stack.tokenizer.decode(list(stack.script.requests[0].prompt_token_ids))


def test_a_nul_character_of_an_answer(http: httpx.Client, stack: Stack) -> None:
    said = "a\x00b"
    asked = {"role": "user", "content": "so?"}
    stack.say(said)
    message = post(http, "/v1/chat/completions", {"messages": [ASKED]})["choices"][0]["message"]
    first = post(http, "/v1/responses", {"input": "hi"})
    blocks = post(http, "/v1/messages", {"messages": [ASKED], "max_tokens": 99})["content"]
    assert message["content"] == first["output"][0]["content"][0]["text"] == blocks[0]["text"] == said
    stack.say("x")
    post(http, "/v1/chat/completions", {"messages": [ASKED, {**message, "reasoning": said}, asked]})
    post(http, "/v1/responses", {"input": "so?", "previous_response_id": first["id"]})
    post(http, "/v1/responses", {"input": [ASKED, *first["output"], asked]})
    answered = [ASKED, {"role": "assistant", "content": blocks}, asked]
    post(http, "/v1/messages", {"messages": answered, "max_tokens": 99})
    prompts = [stack.tokenizer.decode(list(each.prompt_token_ids)) for each in stack.script.requests]
    assert len(prompts) == 4
    assert all("a\ufffdb" in prompt and "\x00" not in prompt for prompt in prompts)
