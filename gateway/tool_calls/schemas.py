"""JSON schemas of calls: arguments are an object, whatever a tool's own schema leaves open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from carrel.process.request_limits import JSON_WHITE_SPACE
from gateway.errors import InvalidRequest
from gateway.exchange import Tool

# llguidance's, read at a schema's root. Calls and answers that may begin alike must separate their parts alike.
GUIDANCE = "x-guidance"
LAYOUT: Mapping[str, object] = {
    "whitespace_flexible": True,
    "whitespace_pattern": JSON_WHITE_SPACE,
    "item_separator": ",",
    "key_separator": ":",
}
# The root from which references within a tool's schema lead. Reasons for a refusal name it.
ROOT = "urn:tool:{name}"


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """The right side of a rule in Lark's format: JSON of this schema."""
    # `true` and `false` have no place for options
    named: Mapping[str, Any] = {"allOf": [schema]} if isinstance(schema, bool) else schema
    return f"%json {json.dumps({**named, GUIDANCE: {**_options(named), **LAYOUT}})}"


def calls_schema(schemas: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    """The schema of a call as models write it: the name of a tool and, under `key`, its arguments.

    schemas: of the arguments, by the tools' names. They are referred to, not put in place: a branch that nothing
    satisfies would be left out without a word, but a reference to it is refused.
    """
    roots = {name: ROOT.format(name=name) for name in schemas}
    return {
        "anyOf": [_call_schema(name, key, root) for name, root in roots.items()],
        "$defs": {name: _arguments_schema(schemas[name], root) for name, root in roots.items()},
        GUIDANCE: {option: value for each in schemas.values() for option, value in _options(each).items()},
    }


def check_takes_object(tool: Tool) -> None:
    """Refuse a tool where its schema plainly excludes objects. Raises InvalidRequest."""
    if not _may_be_object(tool.parameters):
        raise InvalidRequest(
            f"The parameters of tool {tool.name!r} allow no JSON object, and a call's arguments are one: "
            'give a schema of "type": "object".',
            "tools",
        )


def _call_schema(name: str, key: str, root: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": root}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _arguments_schema(parameters: Mapping[str, Any], root: str) -> dict[str, Any]:
    """A tool's schema with a root of its own, objects only."""
    arguments = {each: value for each, value in parameters.items() if each != GUIDANCE}
    if "$ref" in arguments:
        # in older drafts it hides what stands beside it, and that is the root here
        reference = {"$ref": arguments.pop("$ref")}
        others = arguments.get("allOf")
        arguments["allOf"] = [reference, *(others if isinstance(others, list) else [])]
    # draft 4 calls the root `id`
    return {**arguments, "$id": root, "id": root, "type": "object"}


def _options(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    asked = schema.get(GUIDANCE)
    return asked if isinstance(asked, dict) else {}


def _may_be_object(schema: object) -> bool:
    """Return False where a schema excludes objects, as far as that is seen without following references."""
    match schema:
        case False:
            return False
        case {"type": str(kind)} if kind != "object":
            return False
        case {"type": list(kinds)} if "object" not in kinds:
            return False
        case {"const": value} if not isinstance(value, dict):
            return False
        case {"enum": list(values)} if not any(isinstance(value, dict) for value in values):
            return False
        case {"allOf": list(parts)} if not all(map(_may_be_object, parts)):
            return False
    match schema:
        case {"anyOf": list(options)} | {"oneOf": list(options)}:
            return any(map(_may_be_object, options))
    return True
