"""Grammars of calls, as the worker compiles them: random answers are read back as calls of the tools."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from gateway.exchange import TextDelta, Tool, ToolCallDelta, ToolChoice, Tools
from gateway.tool_calls import FAMILIES, CallsReader, family_of
from gpu_worker.grammar import Grammars
from gpu_worker.records import Grammar, GrammarKind

MODEL = Path(__file__).parents[3] / "models" / "carrel-nano"
END, VOCAB_SIZE = 4, 8192
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
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(str(MODEL), (END,))
    yield grammars
    grammars.close()


def answer(grammars: Grammars, text: str, seed: int) -> str:
    """Of random tokens, with special ones by their names."""
    constraint = grammars.compile(Grammar(GrammarKind.EBNF, text, "tools")).result()
    source, tokens = random.Random(seed), list[int]()
    while not constraint.is_complete and len(tokens) < 300:
        bits = np.unpackbits(constraint.allowed(VOCAB_SIZE, {END}).view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        # to end where it may is as likely as to go on
        token = END if END in allowed and source.random() < 0.5 else source.choice(allowed)
        if token == END:
            break
        constraint.take(token)
        tokens.append(token)
    return Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(tokens, skip_special_tokens=False)


def read(family: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    reader = CallsReader(0, FAMILIES[family], True)
    content, calls = "", list[tuple[str, str]]()
    for part in (*reader.push(text), *reader.flush()):
        match part:
            case TextDelta():
                content += part.text
            case ToolCallDelta() if part.name:
                calls.append((part.name, ""))
            case ToolCallDelta():
                calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return content, calls


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_required_call_is_held_to_is_a_call_of_a_tool(grammars: Grammars, family: str) -> None:
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for tools, most in (
        (Tools(TOOLS, ToolChoice.REQUIRED), 99),
        (Tools(TOOLS, ToolChoice.REQUIRED, "weather", is_parallel=False), 1),
    ):
        text = FAMILIES[family].grammar(tools, None, None)
        names = set()
        for seed in range(6):
            content, calls = read(family, answer(grammars, text, seed))
            assert not content
            assert 0 < len(calls) <= most
            for name, arguments in calls:
                names.add(name)
                jsonschema.validate(json.loads(arguments), schemas[name])
        assert names == {tool.name for tool in tools.callable}


def test_beside_an_answer_of_a_schema_both_may_be_and_a_special_opener_is_that_token(
    grammars: Grammars,
) -> None:
    found = {
        answer(grammars, FAMILIES["hermes"].grammar(Tools(TOOLS), ANSWER, None), seed)[:5]
        for seed in range(8)
    }
    assert found == {'"yes"', '"no"', "<tool"}
    marked = answer(grammars, FAMILIES["mistral"].grammar(Tools(TOOLS), None, opener_id=3), 0)
    assert marked.startswith("<|assistant|>[{")


@pytest.mark.parametrize("family", FAMILIES)
def test_beside_any_text_what_begins_a_call_of_a_strict_tool_is_one(grammars: Grammars, family: str) -> None:
    strict = Tools((replace(TOOLS[0], strict=True), TOOLS[1]))
    opener_id = 3 if FAMILIES[family].is_special else None
    constraint = grammars.compile(
        Grammar(GrammarKind.EBNF, FAMILIES[family].grammar(strict, None, opener_id, is_free=True), "tools")
    ).result()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = {"hermes": "So <tool_call>", "mistral": "So <|assistant|>[", "llama3_json": ""}[family]
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        constraint.take(token)
    begun = {"hermes": "\n{", "mistral": "{", "llama3_json": "{"}[family] + '"name": "'
    bits = np.unpackbits(constraint.allowed(VOCAB_SIZE, {END}).view(np.uint8), bitorder="little")
    assert bits[END] == (family == "llama3_json")
    for token in tokenizer.encode(begun, add_special_tokens=False).ids:
        constraint.take(token)
    bits = np.unpackbits(constraint.allowed(VOCAB_SIZE, {END}).view(np.uint8), bitorder="little")
    names = [tokenizer.decode([token]) for token in np.flatnonzero(bits).tolist()]
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
