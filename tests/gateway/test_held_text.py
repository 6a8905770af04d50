"""Answers that are held to a grammar come as they are written, with the blanks at their start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_worker import Script
from gateway_stack import SPECIAL, TEMPLATE, Stack, running_stack, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models
from waiting import PATIENCE

from gateway.v1 import chat_pb2, chat_pb2_grpc

ASKED = {"role": "user", "content": "hi"}
LEADING = TEMPLATE.replace(
    "{{ m['content'] }}", "{{ ' ' if m['role'] == 'assistant' else '' }}{{ m['content'] }}"
)
BEGUN = "<|user|>hi<|end|><|assistant|>"
HELD: list[dict[str, Any]] = [
    {"guided_choice": [" a", " b"]},
    {"guided_regex": ".{2}"},
    {"structured_outputs": {"grammar": 'start: " b"'}},
    {"response_format": {"type": "json_object"}},
]
TOOL = {"type": "function", "function": {"name": "time"}}
STRICT = {"type": "function", "function": {"name": "time", "strict": True}}


def write_stripping_tokenizer(folder: Path) -> Path:
    """A tokenizer like Llama 2's: its decoder strips a blank at the start of a text."""
    write_tokenizer(folder, LEADING)
    names = [*SPECIAL, "\u2581", "\u2581b", "b", "h", "i", "q", "u", "e", "s", "t", "o", "n", "a", "w", "r"]
    raw = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, [("\u2581", "b")]))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    raw.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["bytes", "stripping"])
def leading(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server with a template that writes a blank before each assistant's message."""
    folder = tmp_path_factory.mktemp("leading")
    write = write_stripping_tokenizer if request.param else lambda path: write_tokenizer(path, LEADING)
    with running_stack(folder, write(folder / "model"), 2048) as stack:
        yield stack


def say(stack: Stack) -> Script:
    """The worker's next answers are a blank and a letter."""
    ids = [stack.tokenizer.token_to_id(name) for name in ("\u2581b", "\u0120b")]
    known = [each for each in ids if each is not None]
    stack.script = Script(reply=known or stack.tokenizer.encode(" b", add_special_tokens=False).ids)
    return stack.script


def text_of(stack: Stack, path: str, **body: Any) -> str:
    answer = httpx.post(stack.url + path, json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def streamed(stack: Stack, **body: Any) -> str:
    text = ""
    with httpx.stream(
        "POST", f"{stack.url}/v1/chat/completions", json={**body, "stream": True}, timeout=PATIENCE
    ) as answer:
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                text += "".join(each["delta"].get("content") or "" for each in json.loads(data)["choices"])
    return text


@pytest.mark.parametrize("held", HELD)
def test_a_held_chat_keeps_the_blank_that_the_template_writes_too(
    leading: Stack, held: dict[str, Any]
) -> None:
    script = say(leading)
    assert text_of(leading, "/v1/chat/completions", messages=[ASKED], **held) == " b"
    assert streamed(leading, messages=[ASKED], **held) == " b"
    stopped = text_of(leading, "/v1/chat/completions", messages=[ASKED], stop=["b"], **held)
    assert stopped == " "
    assert all(request.HasField("grammar") for request in script.requests)


def test_a_chat_over_grpc_and_one_beside_tools_keep_it(leading: Stack) -> None:
    say(leading)
    held = {"response_format": {"type": "json_object"}}
    assert text_of(leading, "/v1/chat/completions", messages=[ASKED], tools=[TOOL], **held) == " b"
    request = chat_pb2.ChatRequest(
        messages=[chat_pb2.Message(role="user", content="hi")],
        structured_outputs=chat_pb2.StructuredOutputs(regex=".{2}"),
    )
    with grpc.insecure_channel(leading.grpc_target) as channel:
        events = list(chat_pb2_grpc.ChatStub(channel).Complete(request, timeout=PATIENCE))
    assert "".join(event.delta.content for event in events) == " b"


@pytest.mark.parametrize("prompt", [[0], BEGUN, "hi"])
def test_a_held_completion_keeps_it_whatever_comes_before(leading: Stack, prompt: list[int] | str) -> None:
    say(leading)
    held = {"guided_regex": ".{2}"}
    assert text_of(leading, "/v1/completions", prompt=prompt, **held) == " b"
    echoed = text_of(leading, "/v1/completions", prompt="hi", echo=True, **held)
    assert echoed == "hi b"


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}, {"tools": [STRICT]}])
def test_any_other_chat_is_without_it(leading: Stack, fields: dict[str, Any]) -> None:
    say(leading)
    assert text_of(leading, "/v1/chat/completions", messages=[ASKED], **fields) == "b"
    assert streamed(leading, messages=[ASKED], **fields) == "b"
