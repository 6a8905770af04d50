"""Grammars of random tools and answers: all that is valid may be written, and nothing else ends."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from drawn_json import Drawer
from grammar_walks import Walker, read

from gateway.errors import InvalidRequest
from gateway.exchange import Tool, ToolChoice, Tools
from gateway.tool_calls import FAMILIES
from gpu_worker.errors import RequestError

NAMES = ("look", "name", "parameters", "lookup")


# schemas that leave open what arguments are, and an object of each
OPEN = [
    ({}, {}),
    ({"properties": {"a": {"const": 1}}}, {"a": 1}),
    ({"required": ["a"]}, {"a": 1}),
    ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"b": None}),
    ({"enum": ["a", 7, {"a": 1}]}, {"a": 1}),
    ({"allOf": [True]}, {}),
    ({"allOf": [{"properties": {"a": {"const": 1}}}, {"required": ["a"]}]}, {"a": 1}),
    ({"type": ["object", "null"], "properties": {"a": {"const": 1}}}, {"a": 1}),
    ({"oneOf": [{"type": "string"}, {"type": "object"}]}, {"a": 1}),
    ({"minimum": 3, "maxLength": 2}, {"a": "abc"}),
    ({"description": "anything"}, {}),
    ({"$ref": "#/$defs/it", "$defs": {"it": {"properties": {"next": {"$ref": "#/$defs/it"}}}}}, {"next": {}}),
    ({"properties": {"next": {"$ref": "#"}}, "additionalProperties": False}, {"next": {"next": {}}}),
]
# schemas of no object, and whether that is seen before the grammar is compiled
EMPTY = [
    ({"type": "string"}, True),
    ({"type": ["string", "null"]}, True),
    ({"enum": ["a"]}, True),
    ({"const": 3}, True),
    ({"allOf": [False]}, True),
    ({"allOf": [{"type": "array"}, {}]}, True),
    ({"anyOf": [{"type": "string"}, {"anyOf": [{"type": "null"}]}]}, True),
    ({"oneOf": [{"const": []}, False]}, True),
    ({"required": ["a"], "properties": {"a": False}}, False),
    ({"$ref": "#/$defs/it", "$defs": {"it": {"type": "string"}}}, False),
    (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/it"}},
            "required": ["a"],
            "$defs": {"it": False},
        },
        False,
    ),
]
DRAFTS = [None, *(f"http://json-schema.org/draft-{number}/schema#" for number in ("04", "06", "07"))]


@pytest.fixture(scope="module")
def walker() -> Iterator[Walker]:
    walker = Walker()
    yield walker
    walker.grammars.close()


def drawn(seed: int) -> tuple[Drawer, tuple[Tool, ...], dict[str, Any]]:
    """Tools and the schema of an answer."""
    source = random.Random(seed)
    drawer = Drawer(source)
    names = source.sample(NAMES, source.randint(1, 3))
    return drawer, tuple(Tool(name, None, drawer.arguments()) for name in names), drawer.schema()


def written(family: str, drawer: Drawer, calls: list[tuple[str, Any]]) -> str:
    """Calls with white space wherever JSON has it."""
    form = FAMILIES[family]
    texts = [drawer.written({"name": name, form.arguments: arguments}) for name, arguments in calls]
    if form.closer:
        return form.between.join(f"{form.opener}\n{text}\n{form.closer}" for text in texts)
    return form.opener + form.list_begin + form.between.join(texts) + form.list_end


def is_of(schema: dict[str, Any], value: object) -> bool:
    return jsonschema.Draft202012Validator({k: v for k, v in schema.items() if k != "$schema"}).is_valid(
        value
    )


def is_answer(schema: dict[str, Any], text: str) -> bool:
    try:
        return is_of(schema, json.loads(text))
    except ValueError:
        return False


def an_object(drawer: Drawer, tool: Tool) -> dict[str, Any]:
    values = (drawer.value(dict(tool.parameters)) for _ in range(1000))
    return next(value for value in values if isinstance(value, dict) and is_of(dict(tool.parameters), value))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(40))
def test_every_call_and_every_answer_may_be_written(walker: Walker, family: str, seed: int) -> None:
    drawer, tools, schema = drawn(seed)
    grammar = FAMILIES[family].grammar(Tools(tools), json.dumps(schema), None)
    for _ in range(4):
        calls = [(tool.name, an_object(drawer, tool)) for tool in tools]
        text = written(family, drawer, calls)
        assert walker.takes(grammar, drawer.pieces(text)), text
        assert [(name, json.loads(of_call)) for name, of_call in read(family, text)[1]] == calls
        answer = drawer.value(schema)
        assert is_of(schema, answer)
        text = drawer.written(answer)
        assert walker.takes(grammar, drawer.pieces(text)), text


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_at_random_is_of_the_schema_or_calls_with_objects(walker: Walker, family: str) -> None:
    num_answers = num_calls = 0
    for seed in range(60):
        _, tools, schema = drawn(seed)
        grammar = FAMILIES[family].grammar(Tools(tools), json.dumps(schema), None)
        text = walker.walk(grammar, random.Random(seed))
        if text is None:
            continue
        if is_answer(schema, text):
            num_answers += 1
            continue
        content, calls = read(family, text)
        assert not content, (seed, text)
        assert calls
        num_calls += 1
        schemas = {tool.name: dict(tool.parameters) for tool in tools}
        for name, arguments in calls:
            assert isinstance(json.loads(arguments), dict), (seed, text)
            assert is_of(schemas[name], json.loads(arguments)), (seed, text)
    assert num_answers > 5
    assert num_calls > 5


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("schema", "arguments"), OPEN)
def test_arguments_are_an_object_whatever_their_schema_leaves_open(
    walker: Walker, schema: dict[str, Any], arguments: dict[str, Any], draft: str | None
) -> None:
    schema = schema if draft is None else {**schema, "$schema": draft}
    other = Tool("other", None, {"$ref": "#/$defs/it", "$defs": {"it": {"enum": [{}]}}})
    for tools in (
        Tools((Tool("look", None, schema), other), ToolChoice.REQUIRED),
        Tools((Tool("look", None, schema), other), ToolChoice.REQUIRED, "look"),
        Tools((Tool("look", None, schema, strict=True), other)),
    ):
        for family, form in FAMILIES.items():
            grammar = form.grammar(tools, None, None, tools.choice is ToolChoice.AUTO)
            drawer = Drawer(random.Random(0))
            assert walker.takes(grammar, [written(family, drawer, [("look", arguments)])])
            for wrong in (33333332, "a", None, True, [], [{}]):
                text = written(family, drawer, [("look", wrong)])
                assert not walker.takes(grammar, [text]), (family, text)


@pytest.mark.parametrize(("schema", "is_seen"), EMPTY)
def test_a_tool_that_no_object_satisfies_is_refused_by_its_name(
    walker: Walker, schema: dict[str, Any], is_seen: bool
) -> None:
    tools = (Tool("fine", None, {}), Tool("look", None, schema))
    for form in FAMILIES.values():
        if is_seen:
            with pytest.raises(InvalidRequest, match="'look'"):
                form.grammar(Tools(tools, ToolChoice.REQUIRED), None, None)
            # calls of it are held to nothing
            form.grammar(Tools((replace(tools[0], strict=True), tools[1])), None, None, is_free=True)
            continue
        with pytest.raises(RequestError, match="tool:look"):
            walker.constraint(form.grammar(Tools(tools, ToolChoice.REQUIRED), None, None))


def test_with_a_strict_tool_a_tag_before_a_brace_begins_no_other_call(walker: Walker) -> None:
    tools = Tools((Tool("look", None, {}, strict=True),))
    grammar = FAMILIES["llama3_json"].grammar(tools, None, None, is_free=True)
    for text in (
        "<|python_tag|>",
        "<|python_tag|>print()",
        " so {",
        '{"name": "look", "parameters": {}}',
        "",
    ):
        assert walker.takes(grammar, [text]), text
    for text in ('<|python_tag|>{"name": "x", "parameters": 3}', " \n<|python_tag|> {", ' {"name": "x"}'):
        assert not walker.takes(grammar, [text]), text
