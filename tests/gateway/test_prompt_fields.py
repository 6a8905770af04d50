"""Fields that say how a prompt is made are honoured; others that would change the answer are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from gateway_stack import MAX_MODEL_LEN, TEMPLATE, Stack, running_stack, write_tokenizer
from waiting import PATIENCE

from gateway.v1 import chat_pb2, chat_pb2_grpc

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ASKED = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "the fox"}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A template that writes the generation prompt only if it is asked for."""
    folder = tmp_path_factory.mktemp("prompted")
    end = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    model = write_tokenizer(folder / "model", TEMPLATE.removesuffix("<|assistant|>") + end)
    with running_stack(folder, model) as stack:
        yield stack


def prompt_of(stack: Stack, path: str, **body: Any) -> str:
    """Return the prompt that the worker is asked to continue."""
    script = stack.say("the")
    answer = httpx.post(stack.url + path, json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return stack.tokenizer.decode(list(script.requests[0].prompt_token_ids), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "fields", "prompt"),
    [
        ([ASKED], {}, "<|bos|><|user|>hi<|end|><|assistant|>"),
        ([ASKED], {"add_generation_prompt": False}, "<|bos|><|user|>hi<|end|>"),
        ([ASKED], {"truncate_prompt_tokens": 2}, "<|end|><|assistant|>"),
        ([ASKED, BEGUN], {"continue_final_message": True}, "<|bos|><|user|>hi<|end|><|assistant|>the fox"),
        ([{**ASKED, "role": "developer"}], {}, "<|bos|><|system|>hi<|end|><|assistant|>"),
    ],
)
def test_chats(prompted: Stack, messages: list[Any], fields: dict[str, Any], prompt: str) -> None:
    assert prompt_of(prompted, CHAT, messages=messages, **fields) == prompt
    if "truncate_prompt_tokens" not in fields:
        body = {"messages": messages, **fields}
        told = httpx.post(f"{prompted.url}/tokenize", json=body, timeout=PATIENCE).json()["tokens"]
        assert prompted.tokenizer.decode(told, skip_special_tokens=False) == prompt


@pytest.mark.parametrize(
    ("role", "reason"),
    [
        ("usr", "There is no role 'usr'; did you mean user?"),
        ("Assistant", "There is no role 'Assistant'; did you mean assistant?"),
        ("pirate", "There is no role 'pirate': use one of system, developer, user, assistant, tool."),
        ("documents", None),
    ],
)
def test_a_role_is_one_of_clients_or_of_the_template(tmp_path: Path, role: str, reason: str | None) -> None:
    template = "{% for m in messages %}{{ m.role == 'documents' }}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    with running_stack(tmp_path, write_tokenizer(tmp_path / "model", template)) as stack:
        stack.say("the")
        body = {"messages": [{"role": role, "content": "hi"}]}
        answer = httpx.post(stack.url + CHAT, json=body, timeout=PATIENCE)
        assert (None if answer.is_success else answer.json()["error"]["message"]) == reason


def test_completions_keep_the_last_tokens_even_of_what_would_not_fit(stack: Stack) -> None:
    assert prompt_of(
        stack, COMPLETION, prompt=[5, 6, 7, 8], truncate_prompt_tokens=2
    ) == stack.tokenizer.decode([7, 8], skip_special_tokens=False)
    assert prompt_of(stack, COMPLETION, prompt="x" * 9000 + "fox", truncate_prompt_tokens=4).endswith("fox")
    assert prompt_of(stack, COMPLETION, prompt="fox", truncate_prompt_tokens=100) == "fox"


@pytest.mark.parametrize(
    ("path", "fields", "num_answer"),
    [(COMPLETION, {}, 16), (COMPLETION, {"max_tokens": 50}, 50), (CHAT, {}, 1), (CHAT, {"max_tokens": 9}, 9)],
)
def test_a_prompt_keeps_as_many_of_its_last_tokens_as_fit(
    stack: Stack, path: str, fields: dict[str, Any], num_answer: int
) -> None:
    for text, is_cut in (("z" * 500, True), ("z", False)):
        script = stack.say("the")
        prompt = {"messages": [{**ASKED, "content": text}]} if path == CHAT else {"prompt": text}
        body = {**prompt, **fields, "truncate_prompt_tokens": -1}
        assert httpx.post(stack.url + path, json=body, timeout=PATIENCE).status_code == 200
        assert (len(script.requests[0].prompt_token_ids) == MAX_MODEL_LEN - num_answer) == is_cut


def test_tokens_are_told_by_their_names(stack: Stack) -> None:
    for asked in ({"prompt": "the fox"}, {"messages": [ASKED]}):
        told = httpx.post(
            f"{stack.url}/tokenize", json={**asked, "return_token_strs": True}, timeout=PATIENCE
        )
        names = [stack.tokenizer.id_to_token(token_id) for token_id in told.json()["tokens"]]
        assert told.json()["token_strs"] == names
        plain = httpx.post(f"{stack.url}/tokenize", json=asked, timeout=PATIENCE).json()
        assert "token_strs" not in plain


def test_values_that_change_nothing_are_taken(stack: Stack) -> None:
    neutral = {"skip_special_tokens": True, "bad_words": []}
    assert prompt_of(stack, COMPLETION, prompt="fox", **neutral) == "fox"


def test_an_answer_may_keep_its_stop_string_and_its_special_tokens(stack: Stack) -> None:
    for fields, text in (
        ({}, "the "),
        ({"include_stop_str_in_output": True}, "the fox"),
        ({"stop": "dog"}, "the fox jumps"),
        ({"stop": "dog", "skip_special_tokens": False}, "the fox<|end|> jumps"),
    ):
        stack.say("the fox<|end|> jumps")
        body = {"prompt": "a", "stop": "fox", **fields}
        [choice] = httpx.post(stack.url + COMPLETION, json=body, timeout=PATIENCE).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        stack.say("the fox<|end|> jumps")
        named = {"stop": [body["stop"]], **{name: fields[name] for name in fields.keys() - {"stop"}}}
        asked = chat_pb2.ChatRequest(messages=[chat_pb2.Message(role="user", content="a")], **named)
        with grpc.insecure_channel(stack.grpc_target) as channel:
            events = list(chat_pb2_grpc.ChatStub(channel).Complete(asked, timeout=PATIENCE))
        assert "".join(event.delta.content for event in events) == text


def test_how_likely_a_prompt_is_is_told_as_vllm_does(stack: Stack) -> None:
    script = stack.say("dog")
    fields = {"prompt_logprobs": 1, "max_tokens": 1, "n": 2}
    chat = httpx.post(stack.url + CHAT, json={"messages": [ASKED], **fields}, timeout=PATIENCE).json()
    prompt = list(script.requests[0].prompt_token_ids)
    first, *others = chat["prompt_logprobs"]
    assert first is None
    assert len(others) == len(prompt) - 1
    for at, (token_id, told) in enumerate(zip(prompt[1:], others, strict=True)):
        text = stack.tokenizer.decode([token_id], skip_special_tokens=False)
        assert told[str(token_id)] == {"logprob": -1.0 - at, "rank": 2 + at, "decoded_token": text}
        assert (told["20"]["logprob"], told["20"]["rank"]) == (-0.25, 1)
    assert chat["choices"][0]["logprobs"] is None

    asked = {"prompt": [[10, 11, 12], [13]], "prompt_logprobs": 0, "logprobs": 1, "max_tokens": 1}
    for echo in (False, True):
        choices = httpx.post(stack.url + COMPLETION, json={**asked, "echo": echo}, timeout=PATIENCE).json()[
            "choices"
        ]
        told = [choice["prompt_logprobs"] for choice in choices]
        assert [[each and list(each) for each in prompt] for prompt in told] == [
            [None, ["11"], ["12"]],
            [None],
        ]
        of_answer = choices[0]["logprobs"]["top_logprobs"]
        assert len(of_answer) == (4 if echo else 1)
        assert not echo or len(of_answer[1]) == 2
