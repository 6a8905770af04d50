"""Anthropic's own client, unchanged, against the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import httpx
import pydantic
import pytest
from gateway_stack import Stack
from waiting import PATIENCE

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def test_a_message(claude: anthropic.Anthropic, stack: Stack) -> None:
    script = stack.say("the fox 🦊 你好")
    system = [
        {"type": "text", "text": "be"},
        {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}},
    ]
    asked = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "you"}]}]
    reply = claude.messages.create(
        model="tiny", max_tokens=100, system=system, messages=asked,
        extra_body={"temperature": 0.5, "top_k": 3, "carrel": {"policy": "pqcache", "budget": 64}},
    )  # fmt: skip
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "tiny")
    assert [(block.type, block.text) for block in reply.content] == [("text", "the fox 🦊 你好")]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    request = script.requests[0]
    prompt = "<|bos|><|system|>be\nbrief<|end|><|user|>hello\nyou<|end|><|assistant|>"
    assert list(request.prompt_token_ids) == stack.tokenizer.encode(prompt, add_special_tokens=False).ids
    assert (request.sampling.temperature, request.sampling.top_k, request.policy) == (0.5, 3, "pqcache")
    usage = reply.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(request.prompt_token_ids)
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (3, len(script.reply))
    counted = claude.messages.count_tokens(model="tiny", system=system, messages=asked)
    assert counted.input_tokens == len(request.prompt_token_ids)


def test_a_message_streams(claude: anthropic.Anthropic, stack: Stack) -> None:
    script = stack.say("the quick 🦊 over 你好", progress=[(2, 2), (6, 2)])
    with claude.messages.stream(model="tiny", max_tokens=100, messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        reply = stream.get_final_message()
    assert reply.content[0].text == "the quick 🦊 over 你好"
    assert (reply.stop_reason, reply.usage.output_tokens) == ("end_turn", len(script.reply))
    assert [kind for kind in kinds if kind not in ("text", "content_block_delta")] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    stack.say("")
    with claude.messages.stream(model="tiny", max_tokens=100, messages=HELLO) as stream:
        assert stream.get_final_message().content == []


@pytest.mark.parametrize("is_stream", [False, True])
def test_why_a_message_ended(claude: anthropic.Anthropic, stack: Stack, is_stream: bool) -> None:
    stack.say("the quick fox jumps")
    for limit, expected in (
        ({"max_tokens": 50, "stop_sequences": ["never", " fox"]}, ("the quick", "stop_sequence", " fox")),
        ({"max_tokens": 1}, ("the", "max_tokens", None)),
    ):
        asked = {"model": "tiny", "messages": HELLO, **limit}
        if is_stream:
            with claude.messages.stream(**asked) as stream:
                reply = stream.get_final_message()
        else:
            reply = claude.messages.create(**asked)
        assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == expected


def test_a_message_parses_into_a_model(claude: anthropic.Anthropic, stack: Stack) -> None:
    class Place(pydantic.BaseModel):
        city: str

    script = stack.say('{"city": "Rome"}')
    parsed = claude.messages.parse(model="tiny", max_tokens=99, messages=HELLO, output_format=Place)
    assert parsed.parsed_output == Place(city="Rome")
    assert json.loads(script.requests[0].grammar.json_schema)["required"] == ["city"]


def test_other_errors(claude: anthropic.Anthropic, stack: Stack, locked_stack: Stack) -> None:
    asked = {"max_tokens": 5, "messages": HELLO}
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="tiny", max_tokens=0, messages=HELLO)
    assert caught.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude-opus-9", **asked)
    stack.say("the fox", fail_at=1)
    with pytest.raises(anthropic.InternalServerError):
        claude.messages.create(model="tiny", **asked)
    with (
        claude.messages.stream(model="tiny", **asked) as stream,
        pytest.raises(anthropic.APIError, match="failed"),
    ):
        stream.get_final_message()
    locked_stack.say("the fox")
    locked = claude.with_options(base_url=locked_stack.url)
    with pytest.raises(anthropic.AuthenticationError):
        locked.messages.create(model="tiny", **asked)
    assert locked.with_options(api_key="right-key").messages.create(model="tiny", **asked).content


def test_every_refusal_and_a_bug_have_anthropics_form(
    claude: anthropic.Anthropic, locked_stack: Stack, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(stack.service, "chat", fail)
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    for url, headers, status, kind in (
        (stack.url, {}, 500, "api_error"),
        (locked_stack.url, {}, 401, "authentication_error"),
        (stack.url, {"Host": "elsewhere.example"}, 403, "permission_error"),
    ):
        answer = httpx.post(f"{url}/v1/messages", json=body, headers=headers, timeout=PATIENCE)
        assert answer.status_code == status
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
        assert "a bug" not in answer.text
        assert answer.headers["X-Request-Id"]
    # another route's errors are OpenAI's
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
