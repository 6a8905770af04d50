"""Hints of clients are ignored and named in a header, or refused with --strict-fields; nothing else is ignored."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_worker import Script
from gateway_stack import (
    ASKED,
    CHAT,
    COMPLETION,
    MESSAGE,
    RESPONSE,
    TEMPLATE,
    Stack,
    running_stack,
    write_tokenizer,
)
from waiting import PATIENCE

from gateway.rest.hints import EACH, HEADER, HINTS, KINDS, take_hints
from gateway.rest.responses.schemas import ResponsesBody
from gateway.rest.schemas import ChatBody

COUNT = "/v1/messages/count_tokens"
ASKED = {**ASKED, COUNT: {"messages": ASKED[MESSAGE]["messages"]}}
OPENAI = (CHAT, COMPLETION)
MESSAGES = (MESSAGE, COUNT)
EVERY = tuple(ASKED)
API = Path(__file__).parents[2] / "docs" / "api.md"
FUNCTION = {"type": "function", "name": "f"}
CLAUDES = {"name": "f", "input_schema": {}}

# the APIs, fields of their bodies, the header, and the name in the error of a strict server; None: it accepts them
TAKEN: list[tuple[tuple[str, ...], dict[str, Any], str, str | None]] = [
    (EVERY, {"client_metadata": {"a": "b"}}, "client_metadata", None),
    ((*OPENAI, *MESSAGES), {"metadata": {"user_id": "x"}, "user": "x"}, "metadata, user", None),
    (EVERY, {"service_tier": "flex", "safety_identifier": "x"}, "safety_identifier, service_tier", None),
    (EVERY, {"prompt_cache_retention": "24h"}, "prompt_cache_retention", None),
    (EVERY, {"truncation": "auto"}, "truncation", "truncation"),
    (EVERY, {"context_management": {"edits": [{}]}}, "context_management", "context_management"),
    (EVERY, {"verbosity": "low"}, "verbosity", "verbosity"),
    (EVERY, {"reasoning_effort": "high"}, "reasoning_effort", "reasoning_effort"),
    (EVERY, {"thinking_token_budget": 9}, "thinking_token_budget", "thinking_token_budget"),
    ((*OPENAI, *MESSAGES), {"reasoning": {"effort": "low"}}, "reasoning", "reasoning"),
    ((CHAT,), {"store": True, "prediction": {"content": "x"}}, "prediction, store", None),
    ((CHAT,), {"tools": [{"function": {"name": "f"}, "defer_loading": True}]}, "tools.defer_loading",
     "tools.0.defer_loading"),
    ((CHAT,), {"tools": [{"function": {"name": "f", "defer_loading": True}}]}, "tools.function.defer_loading",
     "tools.0.function.defer_loading"),
    ((RESPONSE,), {"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity"),
    ((RESPONSE,), {"reasoning": {"effort": "low"}}, "reasoning.effort", "reasoning.effort"),
    ((RESPONSE,), {"reasoning": {"summary": "auto"}}, "reasoning.summary", None),
    ((RESPONSE,), {"reasoning": {"summary": "concise"}}, "reasoning.summary", "reasoning.summary"),
    ((RESPONSE,), {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]},
     "include.reasoning.encrypted_content", "include"),
    ((RESPONSE,), {"tools": [{"type": "web_search"}, FUNCTION, {"type": "image_generation"}]},
     "tools.web_search, tools.image_generation", "tools.0.type"),
    ((RESPONSE,), {"tools": [FUNCTION, {"type": "custom", "name": "g"}, {"type": "tool_search"}]},
     "tools.custom, tools.tool_search", "tools.1.type"),
    ((RESPONSE,), {"tools": [{"type": "namespace", "name": "n", "tools": [FUNCTION | {"defer_loading": True}]}]},
     "tools.tools.defer_loading", "tools.0.tools.0.defer_loading"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}, CLAUDES]}, "tools.web_search",
     "tools.0.type"),
    (MESSAGES, {"tools": [CLAUDES | {"defer_loading": True}]}, "tools.defer_loading", "tools.0.defer_loading"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking", "thinking.budget_tokens"),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display", "thinking.display"),
    (MESSAGES, {"output_config": {"effort": "medium"}}, "output_config.effort", "output_config.effort"),
]  # fmt: skip
CASES = [
    pytest.param(path, *case, id=f"{path} {str(case[0])[:50]}") for paths, *case in TAKEN for path in paths
]


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("lenient"), model_dir, 2048) as stack:
        yield stack


@pytest.fixture
def stack(lenient: Stack) -> Stack:
    lenient.script = Script()
    return lenient


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("strict"), model_dir, 2048, strict_fields=True) as stack:
        yield stack


def ask(stack: Stack, path: str, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(stack.url + path, json={**ASKED[path], **fields}, timeout=PATIENCE)


@pytest.mark.parametrize(("path", "fields", "header", "param"), CASES)
def test_a_hint_is_named_or_refused(
    stack: Stack, strict: Stack, path: str, fields: dict[str, Any], header: str, param: str | None
) -> None:
    stack.say("the fox")
    strict.say("the fox")
    plain = ask(stack, path, {})
    reply = ask(stack, path, fields)
    assert (reply.status_code, reply.headers.get(HEADER)) == (200, header), reply.text
    assert HEADER not in plain.headers
    prompts = [list(request.prompt_token_ids) for request in stack.script.requests]
    if "tools" not in fields:
        assert prompts == prompts[:1] * len(prompts)
    refusal = ask(strict, path, fields)
    assert HEADER not in refusal.headers
    told = None if refusal.is_success else refusal.json()["error"]["param"]
    assert (refusal.status_code, told) == (200 if param is None else 400, param)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (RESPONSE, {"truncation": "sometimes"}, "truncation"),
        (RESPONSE, {"include": ["message.input_image.image_url"]}, "include"),
        (RESPONSE, {"tools": [{"type": "mcp"}]}, "tools.0.type"),
        (RESPONSE, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (RESPONSE, {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        (RESPONSE, {"background": True}, "background"),
        (CHAT, {"thinking": {"type": "enabled"}}, "thinking"),
        (MESSAGE, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        (MESSAGE, {"thinking": {"type": "between_tools"}}, "thinking.type"),
        (MESSAGE, {"tools": [CLAUDES | {"input_examples": [{}]}]}, "tools.0.input_examples"),
    ],
)  # fmt: skip
def test_what_would_change_an_answer_stays_refused(
    stack: Stack, path: str, fields: dict[str, Any], param: str
) -> None:
    stack.say("the fox")
    reply = ask(stack, path, fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert stack.script.requests == []


def test_a_template_with_the_variables_honours_them(tmp_path: Path) -> None:
    template = TEMPLATE.replace("{{ suffix }}", "{{ reasoning_effort }}/{{ enable_thinking }}")
    with running_stack(tmp_path, write_tokenizer(tmp_path / "model", template)) as stack:
        stack.say("the fox")
        found = [
            (
                ask(stack, path, fields).headers.get(HEADER),
                stack.tokenizer.decode(list(stack.script.requests[-1].prompt_token_ids)),
            )
            for path, fields in [
                (CHAT, {"reasoning_effort": "low"}),
                (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
                (MESSAGE, {"thinking": {"type": "disabled"}}),
                (MESSAGE, {"thinking": {"type": "adaptive"}}),
            ]
        ]
        assert [(header, prompt.removeprefix("hello")) for header, prompt in found] == [
            (None, "low/"),
            ("thinking.budget_tokens", "/True"),
            (None, "/False"),
            (None, "/"),
        ]
        counts = [
            ask(stack, COUNT, {"thinking": {"type": kind}}).json()["input_tokens"]
            for kind in ("enabled", "disabled")
        ]
        assert counts == [len(request.prompt_token_ids) for request in stack.script.requests[1:3]]


def test_a_stream_and_an_error_name_them_too_and_a_debug_line_does(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    stack.say("the fox")
    with caplog.at_level(logging.DEBUG, "gateway.rest.bounded"):
        for fields, status in (({"stream": True}, 200), ({"model": "other"}, 404)):
            reply = ask(stack, RESPONSE, {"verbosity": "low", "reasoning": {"effort": "low"}, **fields})
            assert (reply.status_code, reply.headers[HEADER]) == (status, "verbosity, reasoning.effort")
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.rest.bounded"]
    assert lines == ["ignored hints: verbosity, reasoning.effort"] * 2


WORDS = ["web_search", "web_search_20250305", "auto", "enabled", "reasoning.encrypted_content", "custom"]
HOSTILE = ["\r\nset-cookie: a=b", "x" * 5000, "é🦊", "\x00", ",", "web_search_2025\r\n0305", *WORDS]


def hostile(random_: random.Random, depth: int = 0) -> Any:
    """Return a value with names of hints, at right and at wrong places, and texts that no header may have."""
    names = [step for hint in HINTS for step in hint.path.split(".")] + ["type", *HOSTILE]
    match random_.randrange(6 if depth < 4 else 3):
        case 0 | 1:
            return random_.choice(HOSTILE)
        case 2:
            return random_.choice([None, True, 0, 1.5, 10**30])
        case 3:
            return [hostile(random_, depth + 1) for _ in range(random_.randrange(4))]
    return {random_.choice(names): hostile(random_, depth + 1) for _ in range(random_.randrange(6))}


def test_no_text_of_a_client_gets_into_the_header() -> None:
    random_ = random.Random(7)
    own = {
        name
        for hint in HINTS
        for base in [hint.path.replace(f".{EACH}", "")]
        for name in [base, *(f"{base}.{word}" for word in hint.words)]
    }
    seen = set()
    for _ in range(4000):
        body = {name: hostile(random_) for name in {hint.path.split(".")[0] for hint in HINTS}}
        for kind in KINDS:
            taken = take_hints(json.loads(json.dumps(body)), kind, frozenset())
            assert len(set(taken)) == len(taken)
            seen |= set(taken)
    assert seen <= own
    # all of them together are a short header of plain characters
    header = ", ".join(sorted(own))
    assert re.fullmatch(r"[a-z0-9_., ]{1,2000}", header)
    assert seen >= {"tools.web_search", "verbosity", "thinking", "include.reasoning.encrypted_content"}
    for body in (None, [], "x", 5, {"tools": None}):
        assert take_hints(body, ChatBody, frozenset()) == ()


def test_hostile_bodies_get_an_answer_without_their_texts(stack: Stack) -> None:
    random_ = random.Random(11)
    stack.say("the fox")
    with httpx.Client(base_url=stack.url, timeout=PATIENCE) as client:
        for _ in range(60):
            path = random_.choice(EVERY)
            fields = {hint.path.split(".")[0]: hostile(random_) for hint in random_.sample(HINTS, 4)}
            reply = client.post(path, json={**ASKED[path], **fields})
            assert reply.status_code in (200, 400), reply.text
            assert "set-cookie" not in reply.headers
            assert re.fullmatch(r"[a-z0-9_., ]{0,2000}", reply.headers.get(HEADER, ""))


def test_a_list_of_thousands_is_not_searched(stack: Stack) -> None:
    for path, fields, param in (
        (RESPONSE, {"tools": [{"type": "web_search"}] * 10_000}, "tools"),
        (RESPONSE, {"include": ["reasoning.encrypted_content"] * 10_000}, "include"),
        (MESSAGE, {"tools": [{"defer_loading": True}] * 10_000}, "tools"),
    ):
        assert take_hints({**fields}, ResponsesBody, frozenset()) == ()
        reply = ask(stack, path, fields)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith(param)
        assert HEADER not in reply.headers


def test_the_document_shows_hints_only_where_they_are_taken(stack: Stack, strict: Stack) -> None:
    documents = [httpx.get(f"{each.url}/openapi.json", timeout=PATIENCE).json() for each in (stack, strict)]
    for document, is_taken in zip(documents, (True, False), strict=True):
        schemas = document["components"]["schemas"]
        for kind, name in (
            ("ChatBody", "verbosity"), ("ChatBody", "reasoning"), ("CountBody", "context_management"),
            ("Reasoning", "effort"), ("Thinking", "budget_tokens"), ("OutputConfig", "effort"),
            ("FunctionTool", "defer_loading"), ("ToolDefinition", "defer_loading"),
        ):  # fmt: skip
            assert (name in schemas[kind]["properties"]) == is_taken, (kind, name)
        for path in ASKED:
            told = document["paths"][path]["post"]["responses"]["200"].get("headers", {})
            assert (HEADER in told) == is_taken


def test_the_page_names_every_hint() -> None:
    section = API.read_text().split("### Hints")[1].split("\n### ")[0]
    named = set(re.findall(r"`([\w.]+)`", section))
    paths = {hint.path.replace(f".{EACH}", "") for hint in HINTS}
    words = {word for hint in HINTS if hint.path.endswith(EACH) for word in hint.words}
    assert (paths | words) - named == set()
