from __future__ import annotations

import time

import grpc
import openai
import pytest
from gateway_stack import MAX_MODEL_LEN, Stack

HELLO = [{"role": "user", "content": "hello"}]


def test_chat(client: openai.OpenAI, stack: Stack) -> None:
    script = stack.say("the fox 🦊 你好")
    reply = client.chat.completions.create(model="tiny", messages=HELLO, seed=5)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == "the fox 🦊 你好"
    assert reply.choices[0].finish_reason == "stop"
    request = script.requests[0]
    prompt = "<|bos|><|user|>hello<|end|><|assistant|>"
    assert list(request.prompt_token_ids) == stack.tokenizer.encode(prompt, add_special_tokens=False).ids
    assert request.sampling.seed == 5
    # the model's own defaults where the user says nothing, and all of the context
    assert (request.sampling.temperature, request.sampling.top_k) == (0.25, 7)
    assert request.sampling.max_tokens == MAX_MODEL_LEN - len(request.prompt_token_ids)
    assert reply.usage.prompt_tokens == len(request.prompt_token_ids)
    assert reply.usage.completion_tokens == len(script.reply)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_streams(client: openai.OpenAI, stack: Stack) -> None:
    stack.say("the quick 🦊 over 你好")
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert sum(bool(chunk.choices and chunk.choices[0].delta.role) for chunk in chunks) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "the quick 🦊 over 你好"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices].count("stop") == 1
    assert chunks[-1].choices == []
    carrel = chunks[-1].usage.model_extra["carrel"]
    assert carrel["policy"] == "full"
    assert carrel["timings"]["prefill_ms"] == 1.25


def test_carrel_options_reach_the_worker_and_come_back(client: openai.OpenAI, stack: Stack) -> None:
    script = stack.say("the")
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, extra_body={"carrel": {"policy": "pqcache", "budget": 64}}
    )
    carrel = reply.usage.model_extra["carrel"]
    assert script.requests[0].policy == "pqcache"
    assert script.requests[0].budget.tokens == 64
    prompt_tokens, completion_tokens = reply.usage.prompt_tokens, reply.usage.completion_tokens
    timings = carrel.pop("timings")
    assert carrel == {
        "policy": "pqcache",
        "budget_tokens": 64,
        "context_tokens": prompt_tokens + completion_tokens,
        "cached_tokens": 3,
        "offloaded_tokens": prompt_tokens,
        "attended_tokens": 2.5,
        "window_tokens": 1.5,
        "hit_rate": 0.5,
        "bytes_moved": 7,
    }
    assert timings["ttft_ms"] > 0


@pytest.mark.parametrize(("budget", "share"), [(1, 1.0), (1.0, 1.0), (0.1, 0.1)])
def test_budget_up_to_one_is_a_share(
    client: openai.OpenAI, stack: Stack, budget: float, share: float
) -> None:
    script = stack.say("the")
    client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"carrel": {"budget": budget}})
    assert script.requests[0].budget.share == share


def test_budget_above_the_context_is_fine(client: openai.OpenAI, stack: Stack) -> None:
    script = stack.say("the")
    client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"carrel": {"budget": 10**30}})
    assert script.requests[0].budget.tokens > MAX_MODEL_LEN


def test_several_choices(client: openai.OpenAI, stack: Stack) -> None:
    script = stack.say("the fox")
    reply = client.chat.completions.create(model="tiny", messages=HELLO, n=3, seed=10)
    assert [choice.message.content for choice in reply.choices] == ["the fox"] * 3
    assert sorted(request.sampling.seed for request in script.requests) == [10, 11, 12]
    assert len({request.request_id for request in script.requests}) == 3
    assert reply.usage.prompt_tokens == len(script.requests[0].prompt_token_ids)
    assert reply.usage.completion_tokens == 3 * len(script.reply)
    stream = client.chat.completions.create(model="tiny", messages=HELLO, n=2, stream=True)
    texts = {0: "", 1: ""}
    finished = []
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        finished += [choice.index] if choice.finish_reason else []
    assert texts == {0: "the fox", 1: "the fox"}
    assert sorted(finished) == [0, 1]


@pytest.mark.parametrize("prompt", ["the", ["the", "dog"], [10, 11], [[10, 11], [12]]])
def test_completion_prompts(client: openai.OpenAI, stack: Stack, prompt: object) -> None:
    script = stack.say("the quick brown fox jumps over the lazy dog the quick brown fox")
    reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=4)
    is_many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(reply.choices) == (2 if is_many else 1)
    assert {choice.finish_reason for choice in reply.choices} == {"length"}
    assert reply.usage.prompt_tokens == sum(len(request.prompt_token_ids) for request in script.requests)
    if prompt == [[10, 11], [12]]:
        assert sorted(tuple(request.prompt_token_ids) for request in script.requests) == [(10, 11), (12,)]


def test_logprobs(client: openai.OpenAI, stack: Stack) -> None:
    stack.say("the fox")
    chat = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content
    assert "".join(token.token for token in content) == "the fox"
    assert content[0].logprob == -0.5
    assert len(content[0].top_logprobs) == 2
    completion = client.completions.create(model="tiny", prompt="the", logprobs=1)
    logprobs = completion.choices[0].logprobs
    assert "".join(logprobs.tokens) == "the fox"
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    # the token itself is told beside the best one, and half a character by its bytes
    stack.say("你", best=20)
    completion = client.completions.create(model="tiny", prompt="the", logprobs=1)
    told = completion.choices[0].logprobs
    assert all(
        token in top and len(top) == 2 for token, top in zip(told.tokens, told.top_logprobs, strict=True)
    )
    chat = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True)
    content = chat.choices[0].logprobs.content
    assert len(content) > 1
    assert b"".join(bytes(token.bytes) for token in content) == "你".encode()


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_string_across_tokens(client: openai.OpenAI, stack: Stack, is_stream: bool) -> None:
    script = stack.say("zq 🦊 xw then more")
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, stop=["🦊 xw", "never"], stream=is_stream
    )
    if is_stream:
        chunks = list(reply)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
        usage = reply.usage
        assert usage.completion_tokens < len(script.reply)
        assert usage.model_extra["carrel"]["context_tokens"] == usage.prompt_tokens + usage.completion_tokens
    assert (text, reason) == ("zq ", "stop")
    assert script.aborted == [script.requests[0].request_id]


def test_models(client: openai.OpenAI, stack: Stack) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny"]
    assert models[0].model_extra["max_model_len"] == MAX_MODEL_LEN
    assert abs(models[0].created - time.time()) < 86_400
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../etc/passwd")


def test_context_overflow(client: openai.OpenAI, stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[10] * 200, max_tokens=100)
    assert caught.value.body["message"].startswith(
        "This model's maximum context length is 256 tokens. However, you requested 100 output tokens and your "
        "prompt contains 200 input tokens. Please reduce"
    )
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    huge = "x" * 900_000
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": huge}])
    assert caught.value.param == "messages"
    assert stack.script.requests == []


@pytest.mark.parametrize(
    ("code", "error", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, openai.BadRequestError, 400),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, openai.InternalServerError, 503),
        (grpc.StatusCode.UNAVAILABLE, openai.InternalServerError, 503),
        (grpc.StatusCode.INTERNAL, openai.InternalServerError, 500),
        (grpc.StatusCode.UNKNOWN, openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_worker_errors(
    client: openai.OpenAI, stack: Stack, code: grpc.StatusCode, error: type, status: int, is_stream: bool
) -> None:
    metadata = (("carrel-param", "temperature"), ("carrel-code", "some_code"))
    stack.say("the", fail_at=0, fail_with=(code, "secret detail", metadata))
    with pytest.raises(error) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, stream=is_stream)
    assert caught.value.status_code == status
    headers = caught.value.response.headers
    if status == 400:
        assert (caught.value.param, caught.value.code) == ("temperature", "some_code")
    if status == 503:
        assert int(headers["retry-after"]) > 0
    if status == 500:
        assert "secret" not in str(caught.value)
        assert headers["x-should-retry"] == "false"


def test_error_in_the_middle_of_a_stream(client: openai.OpenAI, stack: Stack) -> None:
    stack.say("the quick brown", fail_at=2)
    stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="generation failed"):
        seen.extend(stream)
    stack.say("the quick brown", fail_at=2)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny", messages=HELLO)


def test_unknown_model_and_wrong_key(client: openai.OpenAI, locked_stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert missing.value.param == "model"
    locked = openai.OpenAI(base_url=f"{locked_stack.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        locked.chat.completions.create(model="tiny", messages=HELLO)
    assert caught.value.response.headers["www-authenticate"] == "Bearer"
    locked_stack.say("the")
    for key in ("right-key", "other-key"):
        assert locked.with_options(api_key=key).chat.completions.create(model="tiny", messages=HELLO).choices


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompt", ["the fox", [10, 11, 12], [10]])
def test_echo_tells_the_prompt_and_how_likely_it_is(
    client: openai.OpenAI, stack: Stack, prompt: object, is_stream: bool
) -> None:
    stack.say("the dog")
    told = stack.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
    reply = client.completions.create(
        model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=1, stream=is_stream
    )
    choices = [chunk.choices[0] for chunk in reply] if is_stream else [reply.choices[0]]
    logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in logprobs for token in part.tokens]
    assert "".join(choice.text for choice in choices) == "".join(tokens)
    scores = [score for part in logprobs for score in part.token_logprobs]
    assert scores == [None, *(-1.0 - at for at in range(len(told) - 1)), -0.5]
    tops = [top for part in logprobs for top in part.top_logprobs]
    assert tops[0] is None
    assert all(token in top for token, top in zip(tokens[1:], tops[1:], strict=True))
    offsets = [offset for part in logprobs for offset in part.text_offset]
    assert offsets == [len("".join(tokens[:at])) for at in range(len(tokens))]


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_echo_leaves_the_begin_token_out_and_offsets_do_not_count_it(
    client: openai.OpenAI, stack: Stack, is_stream: bool
) -> None:
    stack.say("dog")
    bos = stack.tokenizer.token_to_id("<|bos|>")
    prompt = [bos, *stack.tokenizer.encode("the fox", add_special_tokens=False).ids]
    reply = client.completions.create(
        model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=1, stream=is_stream
    )
    choices = [chunk.choices[0] for chunk in reply] if is_stream else [reply.choices[0]]
    logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in logprobs for token in part.tokens]
    text = "".join(choice.text for choice in choices)
    assert tokens[0] == "<|bos|>"
    assert text == "".join(tokens[1:])
    offsets = [offset for part in logprobs for offset in part.text_offset]
    assert offsets == [0, *(len("".join(tokens[1:at])) for at in range(1, len(tokens)))]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_count_characters_whose_bytes_are_several_tokens_once(
    client: openai.OpenAI, stack: Stack, echo: bool, is_stream: bool
) -> None:
    stack.say("🦊 and 你 or dog")
    reply = client.completions.create(
        model="tiny", prompt="你 fox", echo=echo, logprobs=1, max_tokens=64, stream=is_stream
    )
    choices = [chunk.choices[0] for chunk in reply] if is_stream else [reply.choices[0]]
    logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in logprobs for token in part.tokens]
    offsets = [offset for part in logprobs for offset in part.text_offset]
    text = "".join(choice.text for choice in choices)
    assert text == ("你 fox" if echo else "") + "🦊 and 你 or dog"
    found = zip(tokens, offsets, strict=True)
    assert {offset for token, offset in found if token.startswith("bytes:") or "\ufffd" in token} == {
        at for at, character in enumerate(text) if not character.isascii()
    }
    whole = [(token, offset) for token, offset in zip(tokens, offsets, strict=True) if token.isascii()]
    assert [text[offset : offset + len(token)] for token, offset in whole] == [token for token, _ in whole]


def test_an_echo_alone(client: openai.OpenAI, stack: Stack) -> None:
    script = stack.say("the dog")
    reply = client.completions.create(model="tiny", prompt=["the fox", "dog"], echo=True, max_tokens=0)
    assert [(choice.text, choice.finish_reason) for choice in reply.choices] == [
        ("the fox", "length"),
        ("dog", "length"),
    ]
    assert reply.usage.completion_tokens == 0
    assert reply.usage.model_extra["carrel"]["context_tokens"] <= reply.usage.prompt_tokens
    assert not any(request.sampling.HasField("prompt_logprobs") for request in script.requests)


def test_what_an_echo_tells_is_bounded(
    client: openai.OpenAI, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.plan.MAX_PROMPT_SCORES", 12)
    monkeypatch.setattr("gateway.rest.reply.MANY_VALUES", 2)
    stack.say("dog")
    asked = {"model": "tiny", "prompt": [[10, 11], [12, 13]], "echo": True, "max_tokens": 1}
    assert len(client.completions.create(**asked, logprobs=2).choices[1].logprobs.tokens) == 3
    with pytest.raises(openai.BadRequestError, match="16 of them: at most 12") as caught:
        client.completions.create(**asked, logprobs=3)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize("is_chat", [False, True])
def test_tokens_are_told_by_their_ids_and_counted_as_they_come(
    client: openai.OpenAI, stack: Stack, is_chat: bool
) -> None:
    script = stack.say("the 🦊 over 你好")
    create = client.chat.completions.create if is_chat else client.completions.create
    asked = {"model": "tiny", "extra_body": {"return_token_ids": True}, "n": 2, "max_tokens": 100}
    asked |= {"messages": HELLO} if is_chat else {"prompt": "the"}
    for choice in create(**asked).choices:
        assert choice.model_extra["token_ids"] == script.reply
        assert choice.model_extra["prompt_token_ids"] == list(script.requests[0].prompt_token_ids)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(create(**asked, stream=True, stream_options=options))
    told = [choice for chunk in chunks for choice in chunk.choices]
    ids = {
        index: [i for each in told if each.index == index for i in (each.model_extra.get("token_ids") or ())]
        for index in range(2)
    }
    assert ids == {0: script.reply, 1: script.reply}
    prompts = [
        each.model_extra["prompt_token_ids"] for each in told if "prompt_token_ids" in each.model_extra
    ]
    assert prompts == [list(script.requests[0].prompt_token_ids)] * 2
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-2], counts[-1]) == (2 * len(script.reply),) * 2
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}
