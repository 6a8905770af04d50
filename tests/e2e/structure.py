"""Answers held to a schema, as the `openai` package asks for them, of a model that knows nothing of schemas."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from serving import Serving


class Film(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: str = Field(max_length=12)
    kind: Literal["film", "book"]
    years: list[int] = Field(max_length=2)


# Each kind of schema whose answer is of bounded length.
PARTS: dict[str, Any] = {
    "größe": {"type": "string", "maxLength": 5},
    "unit price": {"type": "string", "minLength": 2, "maxLength": 12},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    **{name: {"type": "string", "format": name} for name in ("date", "uuid", "ipv4")},
    "number": {"type": "number", "minimum": -3, "maximum": 40},
    "integer": {"type": "integer", "minimum": -900, "exclusiveMaximum": 1000},
    "choice": {"enum": ["süd", 'a "b"', 1, 2.5, None, True]},
    "constant": {"const": 7},
    "flag": {"type": ["boolean", "null"]},
    "list": {"type": "array", "items": {"$ref": "#/$defs/part"}, "minItems": 1, "maxItems": 3},
    "union": {"anyOf": [{"type": "string", "maxLength": 3}, {"$ref": "#/$defs/part"}, {"type": "null"}]},
}
PART = {"type": "object", "properties": {"x-1": {"type": "boolean"}}, "additionalProperties": False}
KINDS = {"type": "object", "properties": PARTS, "required": [*PARTS], "$defs": {"part": PART}}
KINDS["additionalProperties"] = False


def check_kinds(server: Serving) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "example", "schema": KINDS}}
    reply = server.openai().chat.completions.create(
        model="carrel-nano",
        messages=[{"role": "user", "content": "Give an example."}],
        temperature=1,
        seed=1,
        max_tokens=1500,
        response_format=named,
    )
    assert reply.choices[0].finish_reason == "stop"
    known = jsonschema.FormatChecker(("date", "uuid", "ipv4"))
    checker = jsonschema.Draft202012Validator(KINDS, format_checker=known)
    checker.validate(json.loads(reply.choices[0].message.content))


def check_structure(server: Serving) -> None:
    client = server.openai()
    messages = [{"role": "user", "content": "Tell me of a film."}]
    reply = client.chat.completions.parse(
        model="carrel-nano", messages=messages, response_format=Film, temperature=1, seed=3, n=2
    )
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "stop"]
    assert all(isinstance(choice.message.parsed, Film) for choice in reply.choices)
    chunks = client.chat.completions.create(
        model="carrel-nano", messages=messages, stream=True, extra_body={"guided_choice": ["it is", "it was"]}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) in ("it is", "it was")
    for is_stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="Invalid type: thing"):
            client.chat.completions.create(
                model="carrel-nano",
                messages=messages,
                stream=is_stream,
                extra_body={"guided_json": {"type": "thing"}},
            )


def check_tools(server: Serving) -> None:
    """A loop of two turns: a call that must be, and what the model says to its answer."""
    client = server.openai()
    messages: list[Any] = [{"role": "user", "content": "Which films are there?"}]
    tool = openai.pydantic_function_tool(Film, name="find")
    arguments: dict[str, Any] = {
        "model": "carrel-nano",
        "tools": [tool],
        "temperature": 1,
        "seed": 5,
        "max_tokens": 300,
    }
    choice = client.chat.completions.parse(
        messages=messages, tool_choice="required", parallel_tool_calls=False, **arguments
    ).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "find")
    assert isinstance(call.function.parsed_arguments, Film)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "There is none."}]
    again = client.chat.completions.create(messages=messages, **{**arguments, "max_tokens": 8})
    assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert again.usage.prompt_tokens > 100
