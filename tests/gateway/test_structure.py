"""Fields that say what an answer must be, as the worker gets them; their refusals."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_stack import Stack

from gpu_worker.v1 import gpu_worker_pb2 as pb

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "ü"}}}
TEXT = '{"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "ü"}}}'
NAMED = {"name": "it", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("field", "value", "grammar"),
    [
        ("response_format", {"type": "json_schema", "json_schema": NAMED}, {"json_schema": TEXT}),
        ("response_format", {"type": "json_object"}, {"json_schema": '{"type": "object"}'}),
        ("guided_json", TEXT, {"json_schema": TEXT}),
        ("guided_regex", "a+", {"regex": "a+"}),
        ("guided_grammar", 'root ::= "a"', {"ebnf": 'root ::= "a"'}),
        ("guided_choice", ["a", 'ü"'], {"ebnf": r'start: "a" | "\u00fc\""'}),
    ],
)
def test_every_spelling_reaches_the_worker(
    http: httpx.Client, stack: Stack, field: str, value: Any, grammar: dict[str, str]
) -> None:
    ours = "structured_outputs"
    spellings = [(field, field, value)]
    if name := field.removeprefix("guided_").replace("response_format", ""):
        spellings.append((f"{ours}.{name}", ours, {name: value}))
    for param, spelling, of_field in spellings:
        for path, prompt in (("/v1/chat/completions", HELLO), ("/v1/completions", {"prompt": "x"})):
            script = stack.say("the")
            assert http.post(path, json={**prompt, spelling: of_field}).status_code == 200
            assert script.requests[0].grammar == pb.Grammar(**grammar, param=param)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None, "guided_decoding_backend": "x"},
    ],
)
def test_without_them_an_answer_may_be_anything(
    http: httpx.Client, stack: Stack, fields: dict[str, Any]
) -> None:
    script = stack.say("the")
    assert http.post("/v1/chat/completions", json=HELLO | fields).status_code == 200
    assert not script.requests[0].HasField("grammar")
