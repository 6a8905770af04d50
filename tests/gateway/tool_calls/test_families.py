"""Grammars of calls, as the worker compiles them: random answers are read back as calls of the tools."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import pytest
from grammar_walks import END, Walker, read

from gateway.exchange import Tool, ToolChoice, Tools
from gateway.tool_calls import FAMILIES, family_of

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 99}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("weather", "now", CITY), Tool("time", None, NOTHING))
ANSWER = json.dumps({"enum": ["yes", "no"]})


@pytest.fixture(scope="module")
def walker() -> Iterator[Walker]:
    walker = Walker()
    yield walker
    walker.grammars.close()


def answer(walker: Walker, ebnf: str, seed: int) -> str:
    text = walker.walk(ebnf, random.Random(seed))
    assert text is not None
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_required_call_is_held_to_is_a_call_of_a_tool(walker: Walker, family: str) -> None:
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for tools, most in (
        (Tools(TOOLS, ToolChoice.REQUIRED), 99),
        (Tools(TOOLS, ToolChoice.REQUIRED, "weather", is_parallel=False), 1),
    ):
        text = FAMILIES[family].grammar(tools, None, None)
        names = set()
        for seed in range(6):
            content, calls = read(family, answer(walker, text, seed))
            assert not content
            assert 0 < len(calls) <= most
            for name, arguments in calls:
                names.add(name)
                jsonschema.validate(json.loads(arguments), schemas[name])
        assert names == {tool.name for tool in tools.callable}


def test_beside_an_answer_of_a_schema_both_may_be_and_a_special_opener_is_that_token(
    walker: Walker,
) -> None:
    found = {
        answer(walker, FAMILIES["hermes"].grammar(Tools(TOOLS), ANSWER, None), seed)[:5] for seed in range(8)
    }
    assert found == {'"yes"', '"no"', "<tool"}
    marked = answer(walker, FAMILIES["mistral"].grammar(Tools(TOOLS), None, opener_id=3), 0)
    assert marked.startswith("<|assistant|>[{")


@pytest.mark.parametrize("family", FAMILIES)
def test_beside_any_text_what_begins_a_call_of_a_strict_tool_is_one(walker: Walker, family: str) -> None:
    strict = Tools((replace(TOOLS[0], strict=True), TOOLS[1]))
    opener_id = 3 if FAMILIES[family].is_special else None
    constraint = walker.constraint(FAMILIES[family].grammar(strict, None, opener_id, is_free=True))
    tokenizer = walker.tokenizer
    text = {"hermes": "So <tool_call>", "mistral": "So <|assistant|>[", "llama3_json": ""}[family]
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        constraint.take(token)
    begun = {"hermes": "\n{", "mistral": "{", "llama3_json": "{"}[family] + '"name": "'
    assert (END in walker.allowed(constraint)) == (family == "llama3_json")
    for token in tokenizer.encode(begun, add_special_tokens=False).ids:
        constraint.take(token)
    names = [tokenizer.decode([token]) for token in walker.allowed(constraint)]
    assert names
    assert all("weather".startswith(name) or "time".startswith(name) for name in names)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ('{{ tools }} {"name": x, "parameters": y}', "llama3_json"),
        ("[TOOL_CALLS]", "hermes"),
    ],
)
def test_a_family_is_known_by_its_template(template: str | None, family: str) -> None:
    assert family_of(template) == family
