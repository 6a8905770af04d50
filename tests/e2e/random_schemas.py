"""Random JSON schemas, small enough that any answer fits into some hundred tokens."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "kind", "is_open", "größe", "unit price", "id", "tags", "note", "x-1", "Δt")
PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(red|green|blue)$", "^[a-z]{1,6}( [a-z]{1,6}){0,2}$")
# of bounded length: an answer of an unbounded one may fill the context
FORMATS = ("date", "uuid", "ipv4")


def random_schema(seed: int) -> dict[str, Any]:
    """An object or an array."""
    source = random.Random(seed)
    schema = source.choice([_object, _object, _array])(source, 2)
    if source.random() < 0.3:
        schema["$defs"] = {"part": _any(source, 0)}
        schema.setdefault("properties", {})["part"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema.get("required", []), "part"]
    return schema if "$defs" not in schema or schema["type"] == "object" else random_schema(seed + 10_000)


def _any(source: random.Random, depth: int) -> dict[str, Any]:
    makers = [_text, _text, _number, _integer, _choice, _constant, _flag]
    if depth:
        makers += [_object, _array, _one_of]
    return source.choice(makers)(source, depth - 1)


def _object(source: random.Random, depth: int) -> dict[str, Any]:
    names = source.sample(WORDS, source.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(source, depth) for name in names},
        "required": names if source.random() < 0.5 else names[: source.randint(0, len(names))],
        "additionalProperties": False,
    }


def _array(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randint(0, 2)
    return {
        "type": "array",
        "items": _any(source, depth),
        "minItems": least,
        "maxItems": least + source.randint(0, 2),
    }


def _one_of(source: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(source, 0), _any(source, depth), {"type": "null"}]}


def _text(source: random.Random, depth: int) -> dict[str, Any]:
    bounds: dict[str, Any] = source.choice(
        [
            {"maxLength": source.randint(1, 20)},
            {"minLength": 2, "maxLength": 12},
            {"pattern": source.choice(PATTERNS)},
            {"format": source.choice(FORMATS)},
        ]
    )
    return {"type": "string", **bounds}


def _number(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randint(-50, 50)
    return {"type": "number", "minimum": least, "maximum": least + source.randint(1, 1000)}


def _integer(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "exclusiveMaximum": least + source.randint(1, 10_000)}


def _choice(source: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": source.sample(["north", "süd", 'a "b"', 1, 2.5, None, True], source.randint(1, 5))}


def _constant(source: random.Random, depth: int) -> dict[str, Any]:
    return {"const": source.choice(["v1", 7, False])}


def _flag(source: random.Random, depth: int) -> dict[str, Any]:
    return {"type": source.choice(["boolean", "null"])}
